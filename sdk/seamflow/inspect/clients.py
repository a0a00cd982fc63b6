"""Stubs of the services of a run, on channels that stay open until its endpoints are closed."""

from __future__ import annotations

from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceStub
from seamflow.inspect.endpoints import Endpoints
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub


class RunClients:
    """A call of a service whose address is not known fails as that of one that does not answer."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.run_id = endpoints.run_id or ""
        manager = endpoints.to("trajectory_manager")
        self.runs = async_stub(RunServiceStub, manager)
        self.trajectories = async_stub(TrajectoryServiceStub, manager)
        self.samples = async_stub(SampleServiceStub, manager)
        self.tasks = async_stub(TaskServiceStub, manager)
        self.scheduler = async_stub(SchedulerServiceStub, endpoints.to("scheduler"))
        self.trainer = async_stub(TrainerServiceStub, endpoints.to("trainer"))
        self.weights = async_stub(WeightServiceStub, endpoints.to("weights"))
        self.evaluator = async_stub(EvaluatorServiceStub, endpoints.to("evaluator"))
