// The references of a call: one for each event that is to come (arrival, done, finished), besides SolveCall's own.
#include "server/service_unary.h"

#include <utility>

#include "absl/time/clock.h"

namespace sinkhorn {

UnaryCall::UnaryCall(const Method* method, RpcLoop* loop)
    : SolveCall(method->context, absl::InfiniteFuture(), /*in_stream=*/false),
      method_(method),
      presence_(loop),
      arrived_(this, &UnaryCall::OnArrived),
      done_(this, &UnaryCall::OnDone),
      finished_(this, &UnaryCall::OnFinished),
      responder_(&rpc_) {
  rpc_.AsyncNotifyWhenDone(&done_);
  method->request(&rpc_, &request_, &responder_, loop->queue(), &arrived_);
}

void UnaryCall::OnArrived(bool ok) {
  if (!ok) return Unref();  // The server shuts down: none came.
  Expect(method_, presence_.loop());
  started_ = absl::Now();
  context_->solve_started->Add();
  set_deadline(DeadlineOf(rpc_.deadline()));
  set_trace_id(TraceIdOfCall(rpc_));
  const bool allowed = context_->Allow(rpc_);
  set_allowed(allowed);
  if (allowed) set_tenant(context_->TenantOf(rpc_));
  Ref();  // Of OnDone.
  Ref();  // Of OnFinished.
  Start(&request_);
  Unref();
}

void UnaryCall::OnDone(bool) {
  if (rpc_.IsCancelled()) Cancel();
  Unref();
}

void UnaryCall::OnFinished(bool) { Unref(); }

bool UnaryCall::Defer() {
  presence_.loop()->Post(this);
  return true;
}

void UnaryCall::Deliver(const Error* error, grpc::ByteBuffer* reply) {
  const absl::Duration duration = absl::Now() - started_;
  if (error == nullptr) {
    context_->CallFinished(grpc::StatusCode::OK, duration);
    context_->ReportLoad(grpc::StatusCode::OK, device_seconds(), &rpc_);
    return responder_.Finish(*reply, grpc::Status::OK, &finished_);
  }
  const grpc::Status status = ToGrpcStatus(*error);
  if (auto pushback = RetryPushback(*error)) rpc_.AddTrailingMetadata("grpc-retry-pushback-ms", *pushback);
  context_->CallFinished(status.error_code(), duration);
  context_->ReportLoad(status.error_code(), device_seconds(), &rpc_);
  responder_.FinishWithError(status, &finished_);
}

}  // namespace sinkhorn
