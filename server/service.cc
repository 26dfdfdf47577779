#include "server/service.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/service_call.h"
#include "server/service_stream.h"
#include "sinkhorn/v1/sinkhorn.grpc.pb.h"

namespace sinkhorn {
namespace {

// A Solve call: reactor and problem in one.
class UnaryCall final : public grpc::ServerUnaryReactor, public SolveCall {
 public:
  UnaryCall(ServiceContext* context, grpc::CallbackServerContext* rpc, grpc::ByteBuffer* response)
      : SolveCall(context, DeadlineOf(*rpc), /*in_stream=*/false), rpc_(rpc), response_(response) {}

  void OnCancel() override { Cancel(); }
  void OnDone() override { Unref(); }

 private:
  void Deliver(const Error* error, grpc::ByteBuffer* reply) override {
    grpc::Status status;
    if (error == nullptr) {
      response_->Swap(reply);
    } else {
      status = ToGrpcStatus(*error);
      if (auto pushback = RetryPushback(*error)) rpc_->AddTrailingMetadata("grpc-retry-pushback-ms", *pushback);
    }
    context_->CallFinished(status.error_code(), absl::Now() - started_);
    grpc::ServerUnaryReactor::Finish(std::move(status));
  }

  grpc::CallbackServerContext* const rpc_;
  grpc::ByteBuffer* const response_;
  const absl::Time started_ = absl::Now();
};

using Contract = v1::SinkhornService;
// Solve and SolveStream arrive as bytes: decoding a large message is not for gRPC's threads.
using Base = Contract::WithRawCallbackMethod_Solve<
    Contract::WithRawCallbackMethod_SolveStream<Contract::WithCallbackMethod_GetServerInfo<Contract::Service>>>;

const char* StateName(ServiceState state) {
  switch (state) {
    case ServiceState::kWarming:
      return "warming";
    case ServiceState::kReady:
      return "ready";
    case ServiceState::kDraining:
    case ServiceState::kStopping:
      return "draining";
  }
  return "";
}

}  // namespace

class SinkhornServer::Rpc final : public Base {
 public:
  Rpc(const Executors* executors, Metrics* metrics, const ServiceOptions& options)
      : context_(executors, metrics, options) {}

  ServiceContext* context() { return &context_; }
  StreamRegistry* streams() { return &streams_; }

  grpc::ServerUnaryReactor* Solve(grpc::CallbackServerContext* rpc, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override {
    context_.solve_started->Add();
    auto* call = new UnaryCall(&context_, rpc, response);
    call->Start(const_cast<grpc::ByteBuffer*>(request));  // gRPC made it for this call and looks at it no more.
    return call;
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* SolveStream(grpc::CallbackServerContext* rpc) override {
    return new StreamCall(&context_, &streams_, rpc);
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* rpc, const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse* response) override {
    const absl::Time started = absl::Now();
    context_.metrics->calls_started.With({kGetServerInfoMethod})->Add();
    FillInfo(response);
    context_.metrics->call_seconds.With({kGetServerInfoMethod, "OK"})
        ->Observe(absl::ToDoubleSeconds(absl::Now() - started));
    grpc::ServerUnaryReactor* reactor = rpc->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  void FillInfo(v1::GetServerInfoResponse* info) const {
    const ServiceOptions& options = context_.options;
    info->set_version(options.version);
    info->set_commit(options.commit);
    for (const Executor& executor : context_.executors->all()) {
      v1::Device* device = info->add_devices();
      device->set_name(executor.device.name);
      device->set_backend(executor.device.backend);
      device->set_memory_bytes(executor.device.memory_bytes);
    }
    v1::Limits* limits = info->mutable_limits();
    limits->set_max_points(options.limits.max_points);
    limits->set_max_dimension(options.limits.max_dimension);
    limits->set_max_matrix_elements(options.limits.max_matrix_elements);
    limits->set_max_members(options.limits.max_members);
    limits->set_max_iterations(static_cast<int32_t>(options.limits.max_iterations));
    limits->set_max_receive_message_bytes(options.max_receive_message_bytes);
    limits->set_max_reply_bytes(options.limits.max_reply_bytes);
    limits->set_max_queue_requests(options.queue.max_queue_requests);
    limits->set_max_queue_bytes(options.queue.max_queue_bytes);
    info->set_state(StateName(context_.state.load()));
    info->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - context_.started));
    info->set_requests_in_flight(context_.in_flight.load());
  }

  ServiceContext context_;
  StreamRegistry streams_;
};

SinkhornServer::SinkhornServer(const Executors* executors, Metrics* metrics, const ServiceOptions& options)
    : rpc_(std::make_unique<Rpc>(executors, metrics, options)) {}

SinkhornServer::~SinkhornServer() = default;

grpc::Service* SinkhornServer::rpc() { return rpc_.get(); }

void SinkhornServer::SetState(ServiceState state) {
  rpc_->context()->state.store(state);
  if (state == ServiceState::kStopping) rpc_->streams()->EndAll();
}

ServiceState SinkhornServer::state() const { return rpc_->context()->state.load(); }

bool SinkhornServer::device_lost() const { return rpc_->context()->device_lost(); }

int64_t SinkhornServer::requests_in_flight() const { return rpc_->context()->in_flight.load(); }

int64_t SinkhornServer::held_bytes() const { return rpc_->context()->held_bytes(); }

bool SinkhornServer::AwaitIdle(absl::Time deadline) {
  while (requests_in_flight() > 0) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

void SinkhornServer::AwaitSilence(absl::Duration silence, absl::Time deadline) {
  const auto arrivals = [this] { return rpc_->context()->arrivals.load(); };
  int64_t seen = arrivals();
  absl::Time since = absl::Now();
  while (absl::Now() < std::min(since + silence, deadline)) {
    absl::SleepFor(absl::Milliseconds(2));
    if (arrivals() == seen) continue;
    seen = arrivals();
    since = absl::Now();
  }
}

}  // namespace sinkhorn
