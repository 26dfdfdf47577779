// How the launches of a slice come together: all are laid out first, so that their descriptors travel in one copy, then
// enqueued.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_resident.h"

namespace sinkhorn {
namespace cuda {

class SliceLaunches {
 protected:
  SliceLaunches(absl::Span<Resident* const> residents, LaunchContext* context) : context_(context) {
    for (Resident* resident : residents) residents_.push_back(Of(resident));
    jobs_ = JobsOf(Select([](const TransportResident&) { return true; }));
  }

  using Set = std::vector<int>;  // Of residents, by number.
  // A table whose parts are places in the descriptors' bytes.
  struct Table {
    size_t jobs = 0, first_block = 0;
    int32_t job_count = 0;
    int64_t blocks = 0;
  };

  cudaStream_t stream() const { return context_->stream(); }

  // Copies to the descriptors' bytes and says where.
  size_t Describe(const void* data, size_t bytes) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + bytes);
    std::memcpy(bytes_.data() + at, data, bytes);
    return at;
  }
  size_t JobsOf(const Set& set) {
    std::vector<Job> jobs;
    for (int k : set) jobs.push_back(residents_[k]->job());
    return Describe(jobs.data(), jobs.size() * sizeof(Job));
  }
  // Where a table is, once descriptors have an address.
  LaunchTable At(const Table& table) const {
    return {reinterpret_cast<const Job*>(base_ + table.jobs),
            reinterpret_cast<const int64_t*>(base_ + table.first_block), table.job_count};
  }
  // launch(LaunchTable, blocks) later, when descriptors have an address.
  template <typename Function>
  void Later(const Table& table, Function launch) {
    if (table.blocks > 0) launches_.push_back({table, launch});
  }

  // All of it, at once.
  absl::Status Enqueue() {
    const void* source = context_->Upload(bytes_.data(), bytes_.size());
    base_ = static_cast<char*>(context_->Scratch(bytes_.size()));
    if (source == nullptr || base_ == nullptr) return absl::InternalError("transport: no room for descriptors");
    // What was uploaded may lie in host memory; every block reads it.
    (void)cudaMemcpyAsync(base_, source, bytes_.size(), cudaMemcpyDefault, stream());
    for (const auto& [table, launch] : launches_) launch(At(table), table.blocks);
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("transport: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
  }

  template <typename Predicate>
  Set Select(Predicate wanted) const {
    Set set;
    for (size_t k = 0; k < residents_.size(); ++k) {
      if (wanted(*residents_[k])) set.push_back(static_cast<int>(k));
    }
    return set;
  }
  template <typename Predicate>
  Set Among(const Set& among, Predicate wanted) const {
    Set set;
    for (int k : among) {
      if (wanted(*residents_[k])) set.push_back(k);
    }
    return set;
  }

  // A table over the set, with `blocks_of` blocks for each job.
  template <typename BlocksOf>
  Table TableOf(const Set& set, BlocksOf blocks_of) {
    if (set.empty()) return Table();
    std::vector<int64_t> first = {0};
    for (int k : set) first.push_back(first.back() + blocks_of(residents_[k]->job()));
    Table table;
    table.jobs = set.size() == residents_.size() ? jobs_ : JobsOf(set);
    table.first_block = Describe(first.data(), first.size() * sizeof(int64_t));
    table.job_count = static_cast<int32_t>(set.size());
    table.blocks = first.back();
    return table;
  }

  LaunchContext* context() const { return context_; }
  const std::vector<TransportResident*>& residents() const { return residents_; }

 private:
  LaunchContext* const context_;
  std::vector<TransportResident*> residents_;
  std::vector<char> bytes_;  // Descriptors.
  char* base_ = nullptr;     // Where they are on the device.
  size_t jobs_ = 0;          // Where those of all residents are.
  std::vector<std::pair<Table, std::function<void(const LaunchTable&, int64_t)>>> launches_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_
