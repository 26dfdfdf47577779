#include "server/rpc_loop.h"

#include <utility>

#include "absl/time/clock.h"

namespace sinkhorn {

RpcLoop::~RpcLoop() {
  while (present_.load(std::memory_order_acquire) > 0) absl::SleepFor(absl::Milliseconds(1));
  queue_->Shutdown();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Run();  // A queue must be empty before it goes.
  }
}

void RpcLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void RpcLoop::Run() {
  void* tag;
  bool ok;
  while (queue_->Next(&tag, &ok)) {
    if (tag == nullptr) {
      ResumeAll();
    } else {
      static_cast<Event*>(tag)->Happen(ok);
    }
  }
}

void RpcLoop::Post(Item* item) {
  Item* last = posted_.load(std::memory_order_relaxed);
  do {
    item->next_ = last;
  } while (!posted_.compare_exchange_weak(last, item, std::memory_order_release, std::memory_order_relaxed));
  // Whoever finds nothing posted sets the alarm. It is free: the last one was taken off the queue before posted_ was.
  if (last == nullptr) alarm_.Set(queue_.get(), gpr_time_0(GPR_CLOCK_MONOTONIC), nullptr);
}

void RpcLoop::ResumeAll() {
  Item* last = posted_.exchange(nullptr, std::memory_order_acquire);
  Item* first = nullptr;  // Turns them round.
  while (last != nullptr) last = std::exchange(last->next_, std::exchange(first, last));
  while (first != nullptr) std::exchange(first, first->next_)->Resume();  // Which may end it.
}

}  // namespace sinkhorn
