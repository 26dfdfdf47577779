// A job is cut into units of equal size, which whoever is there takes in turn. Helpers sleep between jobs: those that
// are worth waking them take far longer than that.
#include "kernels/cuda/copy_team.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kAloneBytes = 512 << 10;  // Less is not worth waking anybody.
constexpr size_t kUnitBytes = 128 << 10;

}  // namespace

struct CopyTeam::Job {
  std::vector<Copy> copies;
  std::vector<size_t> begins;  // Of each copy, in bytes of the job; one more: the end.
  size_t units = 0;
  std::atomic<size_t> next{0}, finished{0};

  // Works until every unit has been taken.
  void Work() {
    for (size_t unit; (unit = next.fetch_add(1)) < units;) {
      size_t at = unit * kUnitBytes;
      const size_t end = std::min(at + kUnitBytes, begins.back());
      size_t i = std::upper_bound(begins.begin(), begins.end(), at) - begins.begin() - 1;
      for (; at < end; ++i) {
        const size_t skip = at - begins[i], bytes = std::min(copies[i].bytes - skip, end - at);
        std::memcpy(copies[i].to + skip, copies[i].from + skip, bytes);
        at += bytes;
      }
      finished.fetch_add(1, std::memory_order_release);
    }
  }
};

CopyTeam::CopyTeam(int helpers) {
  for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { Help(); });
}

CopyTeam::~CopyTeam() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  bell_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void CopyTeam::Run(absl::Span<const Copy> copies) {
  size_t total = 0;
  for (const Copy& copy : copies) total += copy.bytes;
  if (total < kAloneBytes || helpers_.empty()) {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    return;
  }
  auto job = std::make_shared<Job>();
  size_t begin = 0;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;  // Positions must differ.
    job->copies.push_back(copy);
    job->begins.push_back(begin);
    begin += copy.bytes;
  }
  job->begins.push_back(total);
  job->units = (total + kUnitBytes - 1) / kUnitBytes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(job);
  }
  bell_.notify_all();
  job->Work();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  }
  while (job->finished.load(std::memory_order_acquire) < job->units) std::this_thread::yield();  // Less than a unit.
}

void CopyTeam::Help() {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      bell_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
      if (stopped_) return;
      job = jobs_.front();
    }
    job->Work();
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  }
}

}  // namespace cuda
}  // namespace sinkhorn
