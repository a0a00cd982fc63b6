// An agent of seamflow from protos/ alone: two turns in each rollout that it leases, until the run ends.
#include <future>
#include <grpcpp/grpcpp.h>
#include <iostream>
#include <random>
#include <thread>
#include "seamflow/common/v1/error.pb.h"
#include "seamflow/rollout/v1/rollout_service.grpc.pb.h"

using namespace seamflow::rollout::v1;
namespace common = seamflow::common::v1;
using namespace std::chrono;
std::unique_ptr<RolloutService::Stub> gateway;
std::string run, token;
int resumed = 0;

// A detail of a failed call, empty without one. Details are google.rpc.* by type, which error.proto mirrors.
template <typename Detail>
Detail detail_of(const grpc::Status& failure) {
  common::Status status;
  status.ParseFromString(failure.error_details());
  Detail found;
  for (const auto& any : status.details())
    if (any.type_url() == "type.googleapis.com/google.rpc." + Detail::descriptor()->name())
      found.ParseFromString(any.value());
  return found;
}

// Repeats a call, ever more slowly, as long as it may succeed. Other failures end the agent; its rollout is replaced.
template <typename Call>
void repeat(const std::string& token, Call call) {
  for (milliseconds delay(100);; delay = std::min(2 * delay, milliseconds(2000))) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + minutes(10));
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    const grpc::Status status = call(&context);
    if (status.ok()) return;
    const auto retry = detail_of<common::RetryInfo>(status);
    if (status.error_code() != grpc::UNAVAILABLE && status.error_code() != grpc::ABORTED && !retry.has_retry_delay())
      throw std::runtime_error(detail_of<common::ErrorInfo>(status).reason() + ": " + status.error_message());
    std::this_thread::sleep_for(delay + seconds(retry.retry_delay().seconds()));
  }
}

// One turn to its end, resumed where its stream broke. The first stream of all is broken after its first tokens.
Message generate(const std::string& credential, GenerateRequest request) {
  TurnEnd end;
  repeat(credential, [&](grpc::ClientContext* context) {
    const auto stream = gateway->Generate(context, request);
    for (GenerateResponse event; (resumed > 0 || request.resume_from_offset() == 0) && stream->Read(&event);) {
      if (event.has_end()) end = event.end();
      request.set_resume_from_offset(request.resume_from_offset() + event.chunk().tokens().token_ids_size());
    }
    if (resumed == 0) context->TryCancel();
    const grpc::Status status = stream->Finish();
    if (end.has_message()) return grpc::Status::OK;
    resumed++;
    const bool is_early = status.ok() || status.error_code() == grpc::CANCELLED;  // the gateway drains, or on purpose
    return is_early ? grpc::Status(grpc::UNAVAILABLE, "the stream ended before the turn") : status;
  });
  return end.message();
}

// Makes two turns, the second with the first one's answer, and closes the rollout with a reward.
void play(const RolloutLease& lease) {
  GenerateRequest turn;
  turn.set_run_id(run);
  turn.set_rollout_id(lease.rollout_id());
  for (const std::string text : {"at 03 up to 20", "at 20 down to 09"}) {
    Message* message = turn.mutable_messages()->add_messages();
    message->set_role("user");
    message->add_content()->set_type("text");
    message->mutable_content(0)->set_text(text);
    turn.set_turn_id("turn-" + text.substr(3, 2));
    *turn.mutable_messages()->add_messages() = generate(lease.credential(), turn);
  }
  FinishRolloutRequest request;
  request.set_run_id(run);
  request.set_rollout_id(lease.rollout_id());
  request.mutable_rewards()->add_rewards()->set_name("reward");
  request.mutable_rewards()->mutable_rewards(0)->set_value(1.0);
  FinishRolloutResponse response;
  repeat(lease.credential(), [&](auto* context) { return gateway->FinishRollout(context, request, &response); });
}

int main(int, char** arguments) {
  grpc::ChannelArguments limits;
  limits.SetMaxReceiveMessageSize(64 << 20);
  limits.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  const auto channel = grpc::CreateCustomChannel(arguments[1], grpc::InsecureChannelCredentials(), limits);
  gateway = RolloutService::NewStub(channel);
  run = arguments[2];
  token = std::getenv("TOKEN") ? std::getenv("TOKEN") : "";
  LeaseRolloutsResponse answer;
  while (answer.empty_reason() != seamflow::trajectory::v1::EMPTY_REASON_RUN_ENDED) {
    LeaseRolloutsRequest request;
    request.set_run_id(run);
    request.set_request_id(std::to_string(std::random_device()()));
    request.set_purpose(common::PURPOSE_EVAL);
    request.mutable_wait()->set_seconds(20);
    repeat(token, [&](auto* context) { return gateway->LeaseRollouts(context, request, &answer); });
    for (const RolloutLease& lease : answer.leases()) {
      ExtendRolloutsRequest extension;
      extension.set_run_id(run);
      extension.add_rollouts()->set_rollout_id(lease.rollout_id());
      extension.mutable_rollouts(0)->set_credential(lease.credential());
      const auto third = seconds(lease.lease_duration().seconds()) / 3;
      auto playing = std::async(std::launch::async, play, std::ref(lease));
      for (ExtendRolloutsResponse extended; playing.wait_for(third) == std::future_status::timeout;)
        repeat(token, [&](auto* context) { return gateway->ExtendRollouts(context, extension, &extended); });
      playing.get();  // throws what the turns have thrown, such as that the rollout was lost
    }
  }
  grpc::ClientContext context;
  const grpc::Status refused = gateway->LeaseRollouts(&context, LeaseRolloutsRequest(), &answer);  // shows an error
  std::cout << "{\"resumed\": " << resumed << ", \"refusal\": {\"reason\": \""
            << detail_of<common::ErrorInfo>(refused).reason() << "\", \"fields\": [\""
            << detail_of<common::BadRequest>(refused).field_violations(0).field() << "\"], \"text\": \""
            << refused.error_message() << "\"}}" << std::endl;
}
