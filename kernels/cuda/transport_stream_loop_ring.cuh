// What a block of a looped problem (transport_stream_loop.cu) has of it in shared memory, and its rows on their way
// there: in groups, through a ring that turns round where an iteration ends, and goes on (Hopper).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_RING_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_RING_CUH_

#include <type_traits>

#include "kernels/cuda/transport_stream_held.cuh"

namespace sinkhorn {
namespace cuda {

// What z is made of where it is not read: points of so many coordinates.
template <int kDims>
struct Points {};
template <typename T>
constexpr int kDimsOf = 0;
template <int kDims>
constexpr int kDimsOf<Points<kDims>> = kDims;
template <typename T>
constexpr bool kIsRead = kDimsOf<T> == 0;

#if SINKHORN_HOPPER

constexpr int kLoopStagesMost = 16, kLoopWarps = kLoopThreads / 32;

// A row or a column: what densities were made with, as a logarithm, and their sum.
struct LoopSum {
  float term, sum;
};
// Its scales are columns' terms, but for those of densities.
struct LoopMemory : TogetherPart {
  StreamFrame frame;
  const char* numbers;     // Of the block's rows,
  int row_bytes;           // of one.
  float factor;            // Of numbers.
  int first_owned, owned;  // Columns that this block adds up, perhaps none.
  alignas(16) float4 parts_of_columns[kLoopThreads];
  float parts_of_rows[2][4][kLoopWarps];
  float row_terms[kLoopRowsMost], row_masses[kLoopRowsMost], row_sums[kLoopRowsMost], column_masses[kLoopOwnedMost];
  // Of the last iteration, and of the one before.
  LoopSum last_rows[kLoopRowsMost], rows_before[kLoopRowsMost], last_columns[kLoopOwnedMost],
      columns_before[kLoopOwnedMost];
  float points[kLoopRowsMost][4];  // Of rows, scaled.
  float relax;                     // How much the iteration in progress is relaxed, where those are judged.
  uint64_t full[kLoopStagesMost];
  double scratch[kMostWarps];
};

// The block's rows, kRows to a stage: from the first to the last in one iteration, from the last to the first in the
// next, so that it begins with what is in the cache. One thread copies.
template <typename T, int kRows, bool kJudged>
class LoopRing {
  static constexpr int kBytes = LoopBytes(kJudged);

 public:
  __device__ explicit LoopRing(LoopMemory* memory) : memory_(*memory) {}

  __device__ int Groups() const { return (memory_.rows + kRows - 1) / kRows; }
  __device__ int CountOf(int g) const { return min(memory_.rows - g * kRows, kRows); }
  // All rows so many times.
  __device__ void Begin(int passes) {
    stages_ = min(kBytes / StageBytes(), kLoopStagesMost);
    ahead_ = passes * Groups();
    if (threadIdx.x != 0) return;
    for (int stage = 0; stage < stages_; ++stage) InitBarrier(&memory_.full[stage], 1);
    FenceBarriers();
    copy_ = {0, ahead_, false};
    for (int stage = 0; stage < stages_; ++stage) Copy(stage);
  }
  // The group that comes, of `count` rows: where they are. A row that is not there is some other.
  __device__ void Await(int count, const T* (&rows)[kRows]) const {
    WaitForPhase(&memory_.full[stage_], phase_);
    const char* stage = DynamicShared() + stage_ * StageBytes();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = reinterpret_cast<const T*>(stage + (r < count ? r : 0) * memory_.row_bytes);
    }
  }
  // When all have read it.
  __device__ void Release() {
    if (threadIdx.x == 0) Copy(stage_);
    if (++stage_ == stages_) stage_ = 0, phase_ ^= 1;
    --ahead_;
  }
  // Those that nobody has waited for are waited for.
  __device__ void End() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int k = min(stages_, ahead_); k > 0; --k) {
      WaitForPhase(&memory_.full[stage_], phase_);
      if (++stage_ == stages_) stage_ = 0, phase_ ^= 1;
    }
    for (int stage = 0; stage < stages_; ++stage) EndBarrier(&memory_.full[stage]);
  }

 private:
  __device__ int StageBytes() const { return kRows * memory_.row_bytes; }
  // The next group, if there is one.
  __device__ void Copy(int stage) {
    if (copy_.left == 0) return;
    --copy_.left;
    const int bytes = CountOf(copy_.group) * memory_.row_bytes;
    ArriveExpecting(&memory_.full[stage], bytes);
    CopyBulk(SharedAddress(DynamicShared()) + stage * StageBytes(),
             memory_.numbers + int64_t{copy_.group} * StageBytes(), bytes, &memory_.full[stage]);
    const int next = copy_.group + (copy_.backwards ? -1 : 1);
    if (next < 0 || next == Groups()) {
      copy_.backwards = !copy_.backwards;
    } else {
      copy_.group = next;
    }
  }

  LoopMemory& memory_;
  struct {
    int group, left;
    bool backwards;
  } copy_;                              // The next; of thread 0.
  int stages_, stage_ = 0, phase_ = 0;  // Of the ring; of the group that comes.
  int ahead_ = 0;                       // Groups that are still to come.
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_LOOP_RING_CUH_
