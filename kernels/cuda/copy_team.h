// Copies between ordinary and pinned memory, by several threads where it is much: one core moves about 10 GB/s, the bus
// to the device five times as much. No CUDA here.
#ifndef SINKHORN_KERNELS_CUDA_COPY_TEAM_H_
#define SINKHORN_KERNELS_CUDA_COPY_TEAM_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/types/span.h"

namespace sinkhorn {
namespace cuda {

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};

class CopyTeam {
 public:
  // `helpers` threads beside the callers'; 0 is fine.
  explicit CopyTeam(int helpers);
  ~CopyTeam();

  // Does all `copies`, which must not overlap; returns when they are done. Any number of threads may call it at once.
  void Run(absl::Span<const Copy> copies);

 private:
  struct Job;
  void Help();

  std::mutex mutex_;
  std::condition_variable bell_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopped_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_COPY_TEAM_H_
