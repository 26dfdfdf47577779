// A thread with a gRPC completion queue of its own: the calls that arrive there are read, decoded, encoded and answered
// there, so that threads need not wake each other for a call.
//
// Every call of the server is on a loop, health checks too: threads of gRPC's own, which its callback and synchronous
// services bring, would wait for the same connections and wake the loop for each of its calls.
//
// The lanes of the scheduler hand finished calls over many at a time: Post wakes the thread at most once for all those
// that come before it gets to look.
#ifndef SINKHORN_SERVER_RPC_LOOP_H_
#define SINKHORN_SERVER_RPC_LOOP_H_

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
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
  // The tag of one step of a call.
  template <class Call>
  class Step final : public Event {
   public:
    Step(Call* call, void (Call::*what)(bool)) : call_(call), what_(what) {}
    void Happen(bool ok) override { (call_->*what_)(ok); }

   private:
    Call* const call_;
    void (Call::*const what_)(bool);
  };
  // Held by a call from when it is expected to its end: the loop stays as long.
  class Presence {
   public:
    explicit Presence(RpcLoop* loop) : loop_(loop) { loop->present_.fetch_add(1, std::memory_order_relaxed); }
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;
    ~Presence() { loop_->present_.fetch_sub(1, std::memory_order_release); }
    RpcLoop* loop() const { return loop_; }

   private:
    RpcLoop* const loop_;
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
  // Waits for the calls to end. REQUIRES: the gRPC server is shut down, which ends those that nobody came for, but
  // still there: what comes out of the queue refers to it.
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
  std::atomic<int> present_{0};
  std::atomic<Item*> posted_{nullptr};  // The last first. Not null: an alarm is on its way.
  grpc::Alarm alarm_;
  std::thread thread_;
};

// What asks gRPC for one call of a method: a service's RequestX. Its second queue, for the arrival, is the first.
template <class Request, class Responder>
using RequestCall =
    std::function<void(grpc::ServerContext*, Request*, Responder*, grpc::ServerCompletionQueue*, void* tag)>;

// A gRPC service whose calls are on loops. Registered with the server's builder before the loops start.
class LoopService {
 public:
  // Makes room on `loop` for calls, as many as come.
  virtual void ExpectCalls(RpcLoop* loop) = 0;

 protected:
  ~LoopService() = default;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_RPC_LOOP_H_
