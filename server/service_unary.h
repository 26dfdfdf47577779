// Solve: one problem, one answer. Private to the service.
#ifndef SINKHORN_SERVER_SERVICE_UNARY_H_
#define SINKHORN_SERVER_SERVICE_UNARY_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_unary_call.h>

#include "server/rpc_loop.h"
#include "server/service_call.h"

namespace sinkhorn {

// A Solve call from before it arrives to its end.
class UnaryCall final : public SolveCall, private RpcLoop::Item {
 public:
  // Makes room on `loop` for one more call; when it has been taken, the call makes room for the next. `service` has the
  // method Solve raw and asynchronous.
  template <class Service>
  static void Expect(ServiceContext* context, Service* service, RpcLoop* loop) {
    auto* call = new UnaryCall(
        context, loop, [](ServiceContext* c, void* s, RpcLoop* l) { Expect(c, static_cast<Service*>(s), l); }, service);
    service->RequestSolve(&call->rpc_, &call->request_, &call->responder_, loop->queue(), loop->queue(),
                          &call->arrived_event_);
  }

 private:
  using ExpectNext = void (*)(ServiceContext*, void*, RpcLoop*);
  // One of the tags of a call.
  class CallEvent final : public RpcLoop::Event {
   public:
    CallEvent(UnaryCall* call, void (UnaryCall::*what)(bool)) : call_(call), what_(what) {}
    void Happen(bool ok) override { (call_->*what_)(ok); }

   private:
    UnaryCall* const call_;
    void (UnaryCall::*const what_)(bool);
  };

  UnaryCall(ServiceContext* context, RpcLoop* loop, ExpectNext expect_next, void* service);

  void OnArrived(bool ok);
  void OnDone(bool ok);      // The client has its answer, or has gone away.
  void OnFinished(bool ok);  // The answer was handed to the network, or to nobody.

  void Deliver(const Error* error, grpc::ByteBuffer* reply) override;
  bool Defer() override;
  void Resume() override { Answer(); }

  RpcLoop* const loop_;
  const ExpectNext expect_next_;
  void* const service_;
  grpc::ServerContext rpc_;
  grpc::ByteBuffer request_;
  grpc::ServerAsyncResponseWriter<grpc::ByteBuffer> responder_;
  absl::Time started_;
  CallEvent arrived_event_, done_event_, finished_event_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_UNARY_H_
