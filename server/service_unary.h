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
  struct Method {
    ServiceContext* context;
    RequestCall<grpc::ByteBuffer, grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>> request;
  };

  // Makes room on `loop` for one more call; when it has been taken, the call makes room for the next. `method` outlives
  // the loop.
  static void Expect(const Method* method, RpcLoop* loop) { new UnaryCall(method, loop); }

 private:
  UnaryCall(const Method* method, RpcLoop* loop);

  void OnArrived(bool ok);
  void OnDone(bool ok);      // The client has its answer, or has gone away.
  void OnFinished(bool ok);  // The answer was handed to the network, or to nobody.

  void Deliver(const Error* error, grpc::ByteBuffer* reply) override;
  bool Defer() override;
  void Resume() override { Answer(); }

  const Method* const method_;
  const RpcLoop::Presence presence_;
  RpcLoop::Step<UnaryCall> arrived_, done_, finished_;
  absl::Time started_;
  grpc::ServerContext rpc_;
  grpc::ByteBuffer request_;
  grpc::ServerAsyncResponseWriter<grpc::ByteBuffer> responder_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SERVICE_UNARY_H_
