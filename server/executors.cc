#include "server/executors.h"

namespace sinkhorn {

const Executor& Executors::LeastLoaded() const {
  if (executors_.size() == 1) return executors_[0];
  const size_t first = turn_.fetch_add(1, std::memory_order_relaxed);
  const Executor* least = nullptr;
  double least_seconds = 0;
  for (size_t i = 0; i < executors_.size(); ++i) {
    const Executor& executor = executors_[(first + i) % executors_.size()];
    const double seconds = executor.scheduler->LoadSeconds();
    if (least != nullptr && seconds >= least_seconds) continue;
    least = &executor;
    least_seconds = seconds;
  }
  return *least;
}

}  // namespace sinkhorn
