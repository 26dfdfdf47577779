#include "server/service.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "server/rpc_loop.h"
#include "server/rpc_small.h"
#include "server/service_stream.h"
#include "server/service_unary.h"
#include "sinkhorn/v1/sinkhorn.grpc.pb.h"

namespace sinkhorn {
namespace {

using Contract = v1::SinkhornService;
// Solve and SolveStream arrive as bytes: large messages are decoded where there is time.
using Base = Contract::WithRawMethod_Solve<
    Contract::WithRawMethod_SolveStream<Contract::WithAsyncMethod_GetServerInfo<Contract::Service>>>;

// Solve calls, and streams, that one queue has room for before it has looked at the first of them. What it has no room
// for goes to another queue, whose thread then waits for the same connection: both wake for each of its messages.
constexpr int kExpectedCalls = 64;

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

  ~Rpc() override {
    if (server_ != nullptr) Shutdown(absl::Now());
  }

  bool Start(grpc::ServerBuilder* builder, LoopService* beside) {
    builder->RegisterService(this);
    for (int i = 0; i < context_.options.rpc_threads; ++i) {
      loops_.push_back(std::make_unique<RpcLoop>(builder->AddCompletionQueue()));
    }
    server_ = builder->BuildAndStart();
    if (server_ == nullptr) return false;
    for (const auto& loop : loops_) {
      for (int i = 0; i < kExpectedCalls; ++i) {
        UnaryCall::Expect(&solve_, loop.get());
        StreamCall::Expect(&solve_stream_, loop.get());
      }
      SmallCall<InfoRequest, InfoResponse>::Expect(&get_server_info_, loop.get());
      if (beside != nullptr) beside->ExpectCalls(loop.get());
      loop->Start();
    }
    return true;
  }

  void Shutdown(absl::Time deadline) {
    server_->Shutdown(absl::ToChronoTime(deadline));
    // It does not wait for the queues: they still have to tell the calls that nobody came for, and what comes out of
    // them refers to the gRPC server.
    loops_.clear();
    server_.reset();
  }

 private:
  using InfoRequest = v1::GetServerInfoRequest;
  using InfoResponse = v1::GetServerInfoResponse;

  grpc::Status GetServerInfo(const grpc::ServerContext& rpc, v1::GetServerInfoResponse* response) {
    const absl::Time started = absl::Now();
    context_.metrics->calls_started.With({kGetServerInfoMethod})->Add();
    const grpc::Status status = context_.Allow(rpc) ? grpc::Status::OK : ToGrpcStatus(Unauthenticated());
    if (status.ok()) FillInfo(response);
    context_.metrics->call_seconds.With({kGetServerInfoMethod, GrpcCodeName(status.error_code())})
        ->Observe(absl::ToDoubleSeconds(absl::Now() - started));
    return status;
  }

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
  const UnaryCall::Method solve_{&context_, [this](auto* rpc, auto* request, auto* responder, auto* queue, void* tag) {
                                   RequestSolve(rpc, request, responder, queue, queue, tag);
                                 }};
  const StreamCall::Method solve_stream_{&context_, &streams_, [this](auto* rpc, auto* stream, auto* queue, void* tag) {
                                           RequestSolveStream(rpc, stream, queue, queue, tag);
                                         }};
  const SmallMethod<InfoRequest, InfoResponse> get_server_info_{
      [this](auto* rpc, auto* request, auto* responder, auto* queue, void* tag) {
        RequestGetServerInfo(rpc, request, responder, queue, queue, tag);
      },
      [this](const auto& rpc, const auto&, auto* response) { return GetServerInfo(rpc, response); }};
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::unique_ptr<RpcLoop>> loops_;
};

SinkhornServer::SinkhornServer(const Executors* executors, Metrics* metrics, const ServiceOptions& options)
    : rpc_(std::make_unique<Rpc>(executors, metrics, options)) {}

SinkhornServer::~SinkhornServer() = default;

bool SinkhornServer::Start(grpc::ServerBuilder* builder, LoopService* beside) { return rpc_->Start(builder, beside); }

void SinkhornServer::Shutdown(absl::Time deadline) { rpc_->Shutdown(deadline); }

void SinkhornServer::SetState(ServiceState state) {
  rpc_->context()->state.store(state);
  if (state == ServiceState::kStopping) rpc_->streams()->EndAll();
}

ServiceState SinkhornServer::state() const { return rpc_->context()->state.load(); }

bool SinkhornServer::device_lost() const { return rpc_->context()->device_lost(); }

int64_t SinkhornServer::requests_in_flight() const { return rpc_->context()->in_flight.load(); }

int SinkhornServer::tenants() const { return rpc_->context()->options.tenants->count(); }

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

bool SinkhornServer::AwaitSent(absl::Time deadline) {
  // A Solve call holds its request until gRPC has written the reply, unless it was refused; a stream is there as long.
  while (held_bytes() > 0 || !rpc_->streams()->empty()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace sinkhorn
