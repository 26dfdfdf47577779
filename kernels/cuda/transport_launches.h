// How the launches of a slice come together: all are laid out first, so that their descriptors travel in one copy, then
// enqueued.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_

#include <algorithm>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_resident.h"

namespace sinkhorn {
namespace cuda {

class SliceLaunches {
 protected:
  SliceLaunches(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context)
      : context_(context), slice_seconds_(slice_seconds) {
    bytes_.clear();
    for (Resident* resident : residents) {
      residents_.push_back(Of(resident));
      residents_.back()->BeginSlice(slice_seconds);
    }
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
    const size_t at = Align();
    Append(data, bytes);
    return at;
  }
  size_t JobsOf(const Set& set) {
    const size_t at = Align();
    for (int k : set) Append(&residents_[k]->job(), sizeof(Job));
    return at;
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
  // The same of what takes no table: call().
  template <typename Function>
  void Later(Function call) {
    launches_.push_back({Table(), [call](const LaunchTable&, int64_t) { call(); }});
  }

  // All of it, at once.
  absl::Status Enqueue() {
    base_ = static_cast<const char*>(context_->Upload(bytes_.data(), bytes_.size()));
    // Small uploads stay in host memory; every block reads them.
    if (base_ != nullptr && bytes_.size() <= kMappedUploadBytes) {
      void* copy = context_->Scratch(bytes_.size());
      if (copy != nullptr) KeepLaunchError(cudaMemcpyAsync(copy, base_, bytes_.size(), cudaMemcpyDefault, stream()));
      base_ = static_cast<const char*>(copy);
    }
    if (base_ == nullptr) return absl::InternalError("transport: no room for descriptors");
    for (const auto& [table, launch] : launches_) launch(At(table), table.blocks);
    const cudaError_t error = TakeLaunchError();
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

  // The set by kind: tell(resident, add) calls add(kind) for each that the resident is of. Thousands of residents are
  // passed over once, however many kinds there are.
  template <typename Kind, typename Tell>
  std::map<Kind, Set> ByKind(const Set& set, Tell tell) const {
    std::map<Kind, Set> kinds;
    for (int k : set) tell(*residents_[k], [&](const Kind& kind) { kinds[kind].push_back(k); });
    return kinds;
  }

  // add(mode) for each that the resident has.
  template <typename Add>
  static void AddModes(const TransportResident& r, Add add) {
    for (Mode mode : kModes) {
      if (r.Has(mode)) add(mode);
    }
  }

  // A table over the set, in its order, with `blocks_of` blocks for each job.
  template <typename BlocksOf>
  Table TableOf(const Set& set, BlocksOf blocks_of) {
    if (set.empty()) return Table();
    std::vector<int64_t> first = {0};
    first.reserve(set.size() + 1);
    for (int k : set) first.push_back(first.back() + blocks_of(residents_[k]->job()));
    Table table;
    if (set.size() == residents_.size() && std::is_sorted(set.begin(), set.end())) {
      table.jobs = jobs_;
    } else if (set == described_) {
      table.jobs = described_jobs_;
    } else {
      table.jobs = described_jobs_ = JobsOf(set);
      described_ = set;
    }
    table.first_block = Describe(first.data(), first.size() * sizeof(int64_t));
    table.job_count = static_cast<int32_t>(set.size());
    table.blocks = first.back();
    return table;
  }

  // The most coordinates of any.
  int LargestDim(const Set& set) const {
    int dim = 0;
    for (int k : set) dim = std::max(dim, residents_[k]->job().dim);
    return dim;
  }

  // Weights and what is multiplied by them (transport_weights.cuh), a chunk of a side's rows after the other: how, by
  // the first three, as transport_launch.h's; weigh(table, blocks, dim, splits, chunk) and
  // add(table, blocks, ranks, chunk).
  template <typename LaunchOf, typename WeightBlocks, typename SumBlocks, typename Weigh, typename Add>
  void Weighed(const Set& set, int side, LaunchOf launch_of, WeightBlocks weight_blocks, SumBlocks sum_blocks,
               Weigh weigh, Add add) {
    const auto kinds = ByKind<std::pair<int, int>>(set, [=](const TransportResident& r, auto add_kind) {
      const WeightLaunch launch = launch_of(r.job(), side);
      if (launch.chunks > 0) add_kind({launch.splits, launch.ranks});
    });
    for (const auto& [kind, jobs] : kinds) {
      const int splits = kind.first, ranks = kind.second, dim = LargestDim(jobs);
      int chunks = 0;
      for (int k : jobs) chunks = std::max(chunks, launch_of(residents_[k]->job(), side).chunks);
      for (int chunk = 0; chunk < chunks; ++chunk) {
        Later(TableOf(jobs, [=](const Job& job) { return weight_blocks(job, side, chunk, splits); }),
              [=](const LaunchTable& t, int64_t blocks) { weigh(t, blocks, dim, splits, chunk); });
        Later(TableOf(jobs, [=](const Job& job) { return sum_blocks(job, side, chunk, ranks); }),
              [=](const LaunchTable& t, int64_t blocks) { add(t, blocks, ranks, chunk); });
      }
    }
  }

  LaunchContext* context() const { return context_; }
  double slice_seconds() const { return slice_seconds_; }
  const std::vector<TransportResident*>& residents() const { return residents_; }

 private:
  // Kept between slices, of which a thread lays out one at a time: new pages take longer than what is written to them.
  static std::vector<char>& Bytes() {
    thread_local std::vector<char> bytes;
    return bytes;
  }
  size_t Align() {
    bytes_.resize((bytes_.size() + 15) / 16 * 16);
    return bytes_.size();
  }
  void Append(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    bytes_.insert(bytes_.end(), from, from + bytes);
  }

  LaunchContext* const context_;
  const double slice_seconds_;
  std::vector<TransportResident*> residents_;
  std::vector<char>& bytes_ = Bytes();  // Descriptors.
  const char* base_ = nullptr;          // Where they are on the device.
  size_t jobs_ = 0;                     // Where those of all residents are,
  size_t described_jobs_ = 0;           // and of the last other set that a table is over.
  Set described_;
  std::vector<std::pair<Table, std::function<void(const LaunchTable&, int64_t)>>> launches_;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_LAUNCHES_H_
