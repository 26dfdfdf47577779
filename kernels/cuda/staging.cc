// A chunk holds a stretch of device memory, padding between tensors included, so that a stretch is one copy on the bus
// however many small tensors are in it.
#include <algorithm>
#include <atomic>
#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/cuda/staging.h"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr size_t kChunkBytes = 4 << 20;
constexpr size_t kChunkCount = 4;
constexpr size_t kGapBytes = 4096;  // Copied along rather than copied around.

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Polls `event`, which was made with cudaEventBlockingSync, for `spin_us`, then sleeps until it is over.
cudaError_t AwaitEvent(cudaEvent_t event, int64_t spin_us) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    const cudaError_t error = cudaEventQuery(event);
    if (error != cudaErrorNotReady) return error;
    Pause();
  } while (std::chrono::steady_clock::now() < end);
  return cudaEventSynchronize(event);
}

}  // namespace

// ---- Signal ---------------------------------------------------------------------------------------------------------

// cuStreamWriteValue32, which the runtime has no name for.
struct Signal::Write {
  using Function = int (*)(CUstream_st*, unsigned long long, unsigned, unsigned);
  Function function = nullptr;
  Write() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000, cudaEnableDefault, &result);
    if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(found);
    (void)cudaGetLastError();
  }
};

cudaError_t Signal::Init(BlockPool* pinned_pool) {
  block_ = PoolBlock(pinned_pool, sizeof(uint32_t));
  if (block_.data() == nullptr) return cudaErrorMemoryAllocation;
  word_ = reinterpret_cast<volatile uint32_t*>(block_.data());
  *word_ = 0;
  return cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync);
}

Signal::~Signal() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

cudaError_t Signal::Mark(cudaStream_t stream) {
  static const Write kWrite;
  stream_ = stream;
  const auto address = reinterpret_cast<unsigned long long>(block_.data());
  written_ = kWrite.function != nullptr && kWrite.function(stream, address, ++last_, 0) == 0;
  return written_ ? cudaSuccess : cudaEventRecord(event_, stream);
}

cudaError_t Signal::Await(int64_t spin_us) {
  if (!written_) return AwaitEvent(event_, spin_us);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 32; ++i) {
      if (*word_ == last_) {
        std::atomic_thread_fence(std::memory_order_acquire);  // The stream wrote it after all else.
        return cudaSuccess;
      }
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  if (cudaError_t error = cudaEventRecord(event_, stream_); error != cudaSuccess) return error;
  return cudaEventSynchronize(event_);  // Sleeps, and returns what went wrong if the word is never written.
}

// ---- Arena ----------------------------------------------------------------------------------------------------------

void Arena::Reset() {
  more_.clear();
  if (wanted_ > bytes_) {
    block_ = PoolBlock();  // First, so that the new one may take its place.
    block_ = PoolBlock(pool_, wanted_);
    bytes_ = block_.data() != nullptr ? wanted_ : 0;
  }
  used_ = 0;
  wanted_ = 0;
}

char* Arena::Take(size_t bytes) {
  const size_t rounded = (bytes + BlockPool::kAlignment - 1) / BlockPool::kAlignment * BlockPool::kAlignment;
  wanted_ += rounded;
  if (rounded <= bytes_ - used_) {
    used_ += rounded;
    return block_.data() + used_ - rounded;
  }
  more_.emplace_back(pool_, bytes);
  return more_.back().data();
}

// ---- Staging --------------------------------------------------------------------------------------------------------

absl::Status Staging::Init(cudaStream_t stream) {
  stream_ = stream;
  memory_ = PoolBlock(&context_->pinned_pool, kChunkBytes * kChunkCount);
  if (memory_.data() == nullptr) return absl::ResourceExhaustedError("no pinned memory");
  chunks_ = std::vector<Chunk>(kChunkCount);
  for (size_t i = 0; i < kChunkCount; ++i) {
    chunks_[i].memory = memory_.data() + i * kChunkBytes;
    const cudaError_t error = chunks_[i].free.Init(&context_->pinned_pool);
    if (absl::Status status = context_->Check(error, "making a signal"); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Collects into copies_ what goes through `memory` next: from transfer *next, of which *skip bytes are done, on.
Staging::Stretch Staging::Fill(absl::Span<const Transfer> transfers, size_t* next, size_t* skip, const char* memory,
                               bool in) {
  copies_.clear();
  Stretch stretch{transfers[*next].device + *skip, 0};
  while (*next < transfers.size()) {
    const Transfer& transfer = transfers[*next];
    const size_t at = static_cast<size_t>(transfer.device + *skip - stretch.device);
    if (at >= kChunkBytes || at - stretch.bytes > kGapBytes) break;
    const size_t bytes = std::min(transfer.bytes - *skip, kChunkBytes - at);
    char* staged = const_cast<char*>(memory) + at;
    char* host = transfer.host + *skip;
    copies_.push_back(in ? Copy{staged, host, bytes} : Copy{host, staged, bytes});
    stretch.bytes = at + bytes;
    *skip += bytes;
    if (*skip < transfer.bytes) break;  // The chunk is full.
    ++*next;
    *skip = 0;
  }
  return stretch;
}

absl::Status Staging::In(absl::Span<const Transfer> transfers) {
  for (size_t next = 0, skip = 0; next < transfers.size();) {
    Chunk& chunk = chunks_[turn_++ % kChunkCount];
    if (absl::Status status = AwaitChunk(&chunk); !status.ok()) return status;
    const Stretch stretch = Fill(transfers, &next, &skip, chunk.memory, /*in=*/true);
    context_->copy_team.Run(copies_);
    cudaError_t error = cudaMemcpyAsync(stretch.device, chunk.memory, stretch.bytes, cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = chunk.free.Mark(stream_);
    if (absl::Status status = context_->Check(error, "copying to the device"); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Staging::Out(absl::Span<const Transfer> transfers) {
  if (transfers.empty()) return absl::OkStatus();
  for (size_t next = 0, skip = 0; next < transfers.size();) {
    Chunk& chunk = chunks_[turn_++ % kChunkCount];
    if (absl::Status status = AwaitChunk(&chunk); !status.ok()) return status;
    const Stretch stretch = Fill(transfers, &next, &skip, chunk.memory, /*in=*/false);
    cudaError_t error = cudaMemcpyAsync(chunk.memory, stretch.device, stretch.bytes, cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = chunk.free.Mark(stream_);
    if (absl::Status status = context_->Check(error, "copying from the device"); !status.ok()) return status;
    chunk.copies.swap(copies_);
  }
  for (size_t i = 0; i < kChunkCount; ++i) {  // In the order of their copies.
    if (absl::Status status = AwaitChunk(&chunks_[turn_++ % kChunkCount]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Until the chunk may be used anew.
absl::Status Staging::AwaitChunk(Chunk* chunk) {
  const cudaError_t error = chunk->free.Await(context_->options.spin_us);
  if (absl::Status status = context_->Check(error, "awaiting a copy"); !status.ok()) return status;
  context_->copy_team.Run(chunk->copies);
  chunk->copies.clear();
  return absl::OkStatus();
}

}  // namespace cuda
}  // namespace sinkhorn
