// A unary method whose answer is at hand: small messages, no queue.
#ifndef SINKHORN_SERVER_RPC_SMALL_H_
#define SINKHORN_SERVER_RPC_SMALL_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_unary_call.h>

#include <functional>

#include "server/rpc_loop.h"

namespace sinkhorn {

template <class Request, class Reply>
struct SmallMethod {
  RequestCall<Request, grpc::ServerAsyncResponseWriter<Reply>> request;
  // In the loop's thread.
  std::function<grpc::Status(const grpc::ServerContext&, const Request&, Reply*)> answer;
};

// A call from before it arrives to its end.
template <class Request, class Reply>
class SmallCall final : private RpcLoop::Event {
 public:
  // Makes room on `loop` for one more call; when it has been taken, the call makes room for the next. `method` outlives
  // the loop.
  static void Expect(const SmallMethod<Request, Reply>* method, RpcLoop* loop) { new SmallCall(method, loop); }

 private:
  SmallCall(const SmallMethod<Request, Reply>* method, RpcLoop* loop) : method_(method), presence_(loop) {
    method->request(&rpc_, &request_, &responder_, loop->queue(), static_cast<Event*>(this));
  }

  // Arrived; then answered.
  void Happen(bool ok) override {
    if (arrived_ || !ok) {
      delete this;
      return;
    }
    arrived_ = true;
    Expect(method_, presence_.loop());
    Reply reply;
    const grpc::Status status = method_->answer(rpc_, request_, &reply);
    responder_.Finish(reply, status, static_cast<Event*>(this));
  }

  const SmallMethod<Request, Reply>* const method_;
  const RpcLoop::Presence presence_;
  bool arrived_ = false;
  grpc::ServerContext rpc_;
  Request request_;
  grpc::ServerAsyncResponseWriter<Reply> responder_{&rpc_};
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_RPC_SMALL_H_
