// A thread with a gRPC completion queue of its own: the calls that arrive there are read, decoded, encoded and answered
// there, so that threads need not wake each other for a call.
//
// The lanes of the scheduler hand finished calls over many at a time: Post wakes the thread at most once for all those
// that come before it gets to look. Private to the service.
#ifndef SINKHORN_SERVER_RPC_LOOP_H_
#define SINKHORN_SERVER_RPC_LOOP_H_

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <thread>

namespace sinkhorn {

class RpcLoop {
 public:
  // A tag of the queue.
  class Event {
   public:
    virtual void Happen(bool ok) = 0;

   protected:
    ~Event() = default;
  };
  // Something that goes on in the loop's thread.
  class Item {
   public:
    virtual void Resume() = 0;

   protected:
    ~Item() = default;

   private:
    friend class RpcLoop;
    Item* next_ = nullptr;
  };

  explicit RpcLoop(std::unique_ptr<grpc::ServerCompletionQueue> queue) : queue_(std::move(queue)) {}
  // REQUIRES: the gRPC server is shut down but still there, and nothing is requested or posted any more.
  ~RpcLoop();

  // Begins to take events off the queue.
  void Start();
  // Calls item->Resume() soon, in the order of the posts of one thread. From any thread.
  void Post(Item* item);

  grpc::ServerCompletionQueue* queue() { return queue_.get(); }

 private:
  void Run();
  void ResumeAll();

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::atomic<Item*> posted_{nullptr};  // The last first. Not null: an alarm is on its way.
  grpc::Alarm alarm_;
  std::thread thread_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_RPC_LOOP_H_
