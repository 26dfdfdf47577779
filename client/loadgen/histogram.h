// Counts of non-negative integers (nanoseconds, batch sizes) in logarithmic buckets, each split in 128 (as HdrHistogram
// does): any percentile to within 0.8 %, the largest and the mean exactly, 60 kB whatever the number of samples.
#ifndef SINKHORN_CLIENT_LOADGEN_HISTOGRAM_H_
#define SINKHORN_CLIENT_LOADGEN_HISTOGRAM_H_

#include <cstdint>
#include <vector>

namespace sinkhorn::client {

class Histogram {
 public:
  Histogram();

  // Negative values count as 0.
  void Record(int64_t value);
  void Merge(const Histogram& other);

  int64_t count() const { return count_; }
  int64_t max() const { return max_; }
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  // The smallest value that at least `fraction` of the samples do not exceed, rounded up to its bucket's end; 0 if
  // empty.
  int64_t Percentile(double fraction) const;

 private:
  std::vector<int64_t> buckets_;
  int64_t count_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_HISTOGRAM_H_
