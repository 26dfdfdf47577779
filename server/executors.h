// The devices of a server, a scheduler for each, and which of them takes the next request.
#ifndef SINKHORN_SERVER_EXECUTORS_H_
#define SINKHORN_SERVER_EXECUTORS_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "server/scheduler.h"

namespace sinkhorn {

struct Executor {
  Executor(Backend* backend, Scheduler* scheduler)
      : backend(backend), scheduler(scheduler), device(backend->device()) {}
  Backend* backend;
  Scheduler* scheduler;
  DeviceDescription device;
};

class Executors {
 public:
  // REQUIRES: not empty. What they point to outlives this.
  explicit Executors(std::vector<Executor> executors) : executors_(std::move(executors)) {}

  // The one with the fewest predicted seconds queued and running; those with equally many take turns. Any thread.
  const Executor& LeastLoaded() const;

  const std::vector<Executor>& all() const { return executors_; }
  const Executor& front() const { return executors_.front(); }

 private:
  const std::vector<Executor> executors_;
  mutable std::atomic<uint32_t> turn_{0};
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_EXECUTORS_H_
