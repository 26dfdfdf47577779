// The plain recipes' kernel: which instance, with how much shared memory, and its launch.
#include <algorithm>
#include <iterator>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/normalization_plain.cuh"
#include "kernels/cuda/normalization_plain_kernels.h"

namespace sinkhorn {
namespace cuda {
namespace normalization {
namespace {

template <Work kWork>
PlainFunction KernelOf(int size, const PlainKind& kind, bool one) {
  if (kind.lead == Lead::kSoftmax) {
    return (kind.is_short ? PlainKernelOf<kWork, true, true> : PlainKernelOf<kWork, false, true>)(size, one);
  }
  return (kind.is_short ? PlainKernelOf<kWork, true, false> : PlainKernelOf<kWork, false, false>)(size, one);
}
PlainFunction KernelOf(int size, const PlainKind& kind, bool one) {
  switch (kind.work) {
    case Work::kForward:
      return KernelOf<Work::kForward>(size, kind, one);
    case Work::kUnrolled:
      return KernelOf<Work::kUnrolled>(size, kind, one);
    case Work::kImplicit:
      return KernelOf<Work::kImplicit>(size, kind, one);
  }
  return nullptr;
}

// Whether the instance for one problem of whole tiles takes it.
bool TakesOne(const PlainKind& kind, const LaunchOf& launch) {
  const Task& task = launch.few[0];
  const bool plan_alone =
      task.plan.data != nullptr && task.row_sums.data == nullptr && task.column_sums.data == nullptr;
  const bool unguarded = kind.lead == Lead::kSoftmax || task.guard == Guard::kNone;
  return launch.tasks == nullptr && launch.few[1].blocks == 0 && !kind.padded && !task.transposed && plan_alone &&
         unguarded;
}

template <class Shape, Work kWork, bool kSoftmax, class Body>
auto WithTraitsOf(bool is_short, bool one, Body body) {
  if constexpr (HasOne<Shape, kWork, kSoftmax>) {
    if (one && is_short) return body(PlainTraits<Shape, kWork, true, true, kSoftmax>());
    if (one) return body(PlainTraits<Shape, kWork, false, true, kSoftmax>());
  }
  if (is_short) return body(PlainTraits<Shape, kWork, true, false, kSoftmax>());
  return body(PlainTraits<Shape, kWork, false, false, kSoftmax>());
}
template <Work kWork, class Body>
auto WithTraitsOf(int size, const PlainKind& kind, bool one, Body body) {
  const auto of = [&](auto softmax) {
    constexpr bool kSoftmax = decltype(softmax)::value;
    return WithPlainShape<kWork, kSoftmax>(
        size, [&](auto shape) { return WithTraitsOf<decltype(shape), kWork, kSoftmax>(kind.is_short, one, body); });
  };
  return kind.lead == Lead::kSoftmax ? of(std::true_type()) : of(std::false_type());
}
// Runs body(Traits) for an instance.
template <class Body>
auto WithTraits(int size, const PlainKind& kind, bool one, Body body) {
  switch (kind.work) {
    case Work::kForward:
      return WithTraitsOf<Work::kForward>(size, kind, one, body);
    case Work::kUnrolled:
      return WithTraitsOf<Work::kUnrolled>(size, kind, one, body);
    default:
      return WithTraitsOf<Work::kImplicit>(size, kind, one, body);
  }
}

// The host's table of members says what the tiles have.
template <Work kWork, bool kSoftmax>
constexpr bool MembersAgree() {
  for (int size = 0; size < static_cast<int>(std::size(kPlainSides)); ++size) {
    const bool agree = WithPlainShape<kWork, kSoftmax>(size, [size](auto shape) {
      using Shape = decltype(shape);
      return Shape::kMembers == PlainMembers(size, kWork, kSoftmax) && Shape::kSize == kPlainSides[size];
    });
    if (!agree) return false;
  }
  return true;
}
template <Work kWork>
constexpr bool kMembersAgree = MembersAgree<kWork, false>() && MembersAgree<kWork, true>();
static_assert(kMembersAgree<Work::kForward> && kMembersAgree<Work::kUnrolled> && kMembersAgree<Work::kImplicit>,
              "see PlainMembers");

}  // namespace

cudaError_t LaunchPlain(int size, const PlainKind& kind, const LaunchOf& launch, int blocks, int threads,
                        int64_t history_bytes, bool early, cudaStream_t stream) {
  const bool one = TakesOne(kind, launch) && KernelOf(size, kind, true) != nullptr;
  const int64_t buffers = WithTraits(size, kind, one, [](auto traits) -> int64_t { return traits.kBufferBytes; });
  const int64_t bytes = (buffers + (kind.work == Work::kUnrolled ? history_bytes : 0)) * threads / kThreads;
  const PlainFunction kernel = KernelOf(size, kind, one);
  if (early) {
    LaunchOverlapping(kernel, blocks, threads, bytes, stream, launch);
  } else {
    LaunchKernel(kernel, blocks, threads, bytes, stream, launch);
  }
  return TakeLaunchError();
}

int64_t PlainHistoryBytes(int size, int32_t iterations) {
  return WithPlainShape<Work::kUnrolled, false>(size, [&](auto shape) {
    using Shape = decltype(shape);
    return HistoryBytes<Shape>(PlainTraits<Shape, Work::kUnrolled, false, false, false>::kHistoryVectors, iterations);
  });
}
int64_t PlainWaitingBytes(int size, int32_t iterations) {
  return WithPlainShape<Work::kUnrolled, false>(size, [&](auto shape) -> int64_t {
    using Shape = decltype(shape);
    return PlainTraits<Shape, Work::kUnrolled, false, false, false>::kDefers ? HistoryBytes<Shape>(2, iterations) : 0;
  });
}
int PlainBlocks(int size, const PlainKind& kind, int64_t history_bytes) {
  return WithTraits(size, kind, !kind.padded, [&](auto traits) {
    constexpr int64_t kSharedBytes = 227 << 10;  // Of Hopper's; with fewer the last blocks wait for others.
    constexpr int64_t kStaticBytes = 2 << 10;    // And what the system takes.
    const int64_t fitting = kSharedBytes / (traits.kBufferBytes + history_bytes + kStaticBytes);
    return static_cast<int>(std::clamp<int64_t>(fitting, 1, traits.kBlocks));
  });
}

}  // namespace normalization
}  // namespace cuda
}  // namespace sinkhorn
