#include "kernels/cuda/block_pool.h"

#include <algorithm>

namespace sinkhorn {
namespace cuda {

BlockPool::~BlockPool() { ReturnEmptySlabs(); }

void* BlockPool::Allocate(size_t bytes) {
  if (bytes > limit_bytes_) return nullptr;  // Also keeps the rounding from overflowing.
  const size_t rounded = std::max<size_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  auto fit = free_.lower_bound({rounded, nullptr});
  if (fit == free_.end()) {
    if (!AddSlab(rounded)) return nullptr;
    fit = free_.lower_bound({rounded, nullptr});
  }
  const auto piece = pieces_.find(fit->second);
  free_.erase(fit);
  if (piece->second.bytes > rounded) {
    char* rest = piece->first + rounded;
    const Piece left{piece->second.bytes - rounded, piece->second.slab, /*free=*/true};
    pieces_.emplace_hint(std::next(piece), rest, left);
    free_.emplace(left.bytes, rest);
  }
  piece->second.bytes = rounded;
  piece->second.free = false;
  stats_.used_bytes += rounded;
  stats_.used_bytes_max = std::max(stats_.used_bytes_max, stats_.used_bytes);
  ++stats_.block_count;
  return piece->first;
}

void BlockPool::Free(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto piece = pieces_.find(static_cast<char*>(block));
  stats_.used_bytes -= piece->second.bytes;
  --stats_.block_count;
  const auto next = std::next(piece);
  if (next != pieces_.end() && next->second.free && next->second.slab == piece->second.slab) {
    piece->second.bytes += next->second.bytes;
    Erase(next);
  }
  if (piece != pieces_.begin()) {
    const auto previous = std::prev(piece);
    if (previous->second.free && previous->second.slab == piece->second.slab) {
      free_.erase({previous->second.bytes, previous->first});
      previous->second.bytes += piece->second.bytes;
      pieces_.erase(piece);
      piece = previous;
    }
  }
  piece->second.free = true;
  free_.emplace(piece->second.bytes, piece->first);
}

bool BlockPool::Reserve() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !pieces_.empty() || AddSlab(kAlignment);
}

// Takes a slab that holds `bytes`: a usual one, else just as much, else after all idle slabs have gone back.
bool BlockPool::AddSlab(size_t bytes) {
  for (const bool after_return : {false, true}) {
    if (after_return) ReturnEmptySlabs();
    for (const size_t size : {std::max(bytes, slab_bytes_), bytes}) {
      if (size > limit_bytes_ - stats_.reserved_bytes) continue;
      char* slab = static_cast<char*>(source_->Take(size));
      if (slab == nullptr) continue;
      stats_.reserved_bytes += size;
      pieces_[slab] = {size, slab, /*free=*/true};
      free_.emplace(size, slab);
      return true;
    }
  }
  return false;
}

void BlockPool::ReturnEmptySlabs() {
  for (auto it = pieces_.begin(); it != pieces_.end();) {
    const auto piece = it++;
    // A free piece that fills its slab: it begins it, and the next piece is another slab's.
    const bool fills = piece->second.free && piece->first == piece->second.slab &&
                       (it == pieces_.end() || it->second.slab != piece->second.slab);
    if (!fills) continue;
    stats_.reserved_bytes -= piece->second.bytes;
    source_->Return(piece->first);
    Erase(piece);
  }
}

// Of a free piece.
void BlockPool::Erase(Pieces::iterator piece) {
  free_.erase({piece->second.bytes, piece->first});
  pieces_.erase(piece);
}

BlockPool::Stats BlockPool::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace cuda
}  // namespace sinkhorn
