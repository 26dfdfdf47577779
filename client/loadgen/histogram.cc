#include "client/loadgen/histogram.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::client {
namespace {

// Values below 2^7 have a bucket each. From there, each power of two is split into 2^7 buckets.
constexpr int kBits = 7;
constexpr int64_t kSplit = int64_t{1} << kBits;
constexpr size_t kBucketCount = static_cast<size_t>((63 - kBits + 1) * kSplit);

size_t BucketOf(int64_t value) {
  if (value < kSplit) return static_cast<size_t>(value);
  const int shift = 63 - __builtin_clzll(static_cast<uint64_t>(value)) - kBits;
  return static_cast<size_t>(shift * kSplit + (value >> shift));
}

// Largest value of the bucket.
int64_t BucketEnd(size_t bucket) {
  if (bucket < static_cast<size_t>(2 * kSplit)) return static_cast<int64_t>(bucket);
  const int shift = static_cast<int>(bucket / kSplit) - 1;
  const uint64_t next = (bucket % kSplit) + kSplit + 1;
  return static_cast<int64_t>((next << shift) - 1);
}

}  // namespace

Histogram::Histogram() : buckets_(kBucketCount) {}

void Histogram::Record(int64_t value) {
  value = std::max<int64_t>(value, 0);
  ++buckets_[BucketOf(value)];
  ++count_;
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

void Histogram::Merge(const Histogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
}

int64_t Histogram::Percentile(double fraction) const {
  const int64_t rank = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(fraction * static_cast<double>(count_))));
  int64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= rank) return std::min(BucketEnd(i), max_);
  }
  return max_;
}

}  // namespace sinkhorn::client
