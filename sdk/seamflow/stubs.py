"""Typed asynchronous stubs: the generated classes type only their synchronous calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import grpc.aio

if TYPE_CHECKING:
    from seamflow.common.v1 import process_service_pb2_grpc as process_service
    from seamflow.environment.v1 import environment_service_pb2_grpc as environment_service
    from seamflow.environment.v1 import reward_service_pb2_grpc as reward_service
    from seamflow.evaluator.v1 import evaluator_service_pb2_grpc as evaluator_service
    from seamflow.launcher.v1 import launcher_service_pb2_grpc as launcher_service
    from seamflow.ranker.v1 import ranker_service_pb2_grpc as ranker_service
    from seamflow.rollout.v1 import rollout_server_service_pb2_grpc as rollout_server_service
    from seamflow.rollout.v1 import rollout_service_pb2_grpc as rollout_service
    from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_service
    from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_service
    from seamflow.trajectory.v1 import column_service_pb2_grpc as column_service
    from seamflow.trajectory.v1 import run_service_pb2_grpc as run_service
    from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_service
    from seamflow.trajectory.v1 import task_service_pb2_grpc as task_service
    from seamflow.trajectory.v1 import trajectory_service_pb2_grpc as trajectory_service
    from seamflow.weights.v1 import weight_service_pb2_grpc as weight_service
    from seamflow.worker.v1 import worker_service_pb2_grpc as worker_service


@overload
def async_stub(
    stub: type[process_service.ProcessServiceStub], channel: grpc.aio.Channel
) -> process_service.ProcessServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[environment_service.EnvironmentServiceStub], channel: grpc.aio.Channel
) -> environment_service.EnvironmentServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[reward_service.RewardServiceStub], channel: grpc.aio.Channel
) -> reward_service.RewardServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[launcher_service.LauncherServiceStub], channel: grpc.aio.Channel
) -> launcher_service.LauncherServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[evaluator_service.EvaluatorServiceStub], channel: grpc.aio.Channel
) -> evaluator_service.EvaluatorServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[ranker_service.RankerServiceStub], channel: grpc.aio.Channel
) -> ranker_service.RankerServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[rollout_server_service.RolloutServerServiceStub], channel: grpc.aio.Channel
) -> rollout_server_service.RolloutServerServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[rollout_service.RolloutServiceStub], channel: grpc.aio.Channel
) -> rollout_service.RolloutServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[scheduler_service.SchedulerServiceStub], channel: grpc.aio.Channel
) -> scheduler_service.SchedulerServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[trainer_service.TrainerServiceStub], channel: grpc.aio.Channel
) -> trainer_service.TrainerServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[column_service.ColumnServiceStub], channel: grpc.aio.Channel
) -> column_service.ColumnServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[run_service.RunServiceStub], channel: grpc.aio.Channel
) -> run_service.RunServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[sample_service.SampleServiceStub], channel: grpc.aio.Channel
) -> sample_service.SampleServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[task_service.TaskServiceStub], channel: grpc.aio.Channel
) -> task_service.TaskServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[trajectory_service.TrajectoryServiceStub], channel: grpc.aio.Channel
) -> trajectory_service.TrajectoryServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[weight_service.WeightServiceStub], channel: grpc.aio.Channel
) -> weight_service.WeightServiceAsyncStub: ...
@overload
def async_stub(
    stub: type[worker_service.WorkerServiceStub], channel: grpc.aio.Channel
) -> worker_service.WorkerServiceAsyncStub: ...
def async_stub(stub: Callable[[Any], Any], channel: grpc.aio.Channel) -> Any:
    """A stub of class `stub` on an asynchronous channel; its calls are awaited."""
    return stub(channel)
