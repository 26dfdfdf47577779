// Counters and histograms cheap enough for every request: an observation is two relaxed atomic additions on a cache
// line that few threads share. (prometheus-cpp's own take a mutex per observation.)
#ifndef SINKHORN_SERVER_INSTRUMENT_H_
#define SINKHORN_SERVER_INSTRUMENT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"

namespace sinkhorn {

inline void AtomicAdd(std::atomic<double>* sum, double value) {
  double old = sum->load(std::memory_order_relaxed);
  while (!sum->compare_exchange_weak(old, old + value, std::memory_order_relaxed)) {
  }
}

class Counter {
 public:
  static constexpr prometheus::MetricType kType = prometheus::MetricType::Counter;
  void Add(double value = 1) { AtomicAdd(&value_, value); }
  double value() const { return value_.load(std::memory_order_relaxed); }
  void Collect(prometheus::ClientMetric* metric) const { metric->counter.value = value(); }

 private:
  std::atomic<double> value_{0};
};

class Histogram {
 public:
  static constexpr prometheus::MetricType kType = prometheus::MetricType::Histogram;
  // `bounds`: ascending upper bounds, at most kBoundsMax; outlive the histogram.
  explicit Histogram(const std::vector<double>& bounds) : bounds_(bounds) {}
  void Observe(double value);
  uint64_t count() const;
  void Collect(prometheus::ClientMetric* metric) const;

 private:
  static constexpr int kShards = 4;
  static constexpr int kBoundsMax = 47;
  struct alignas(64) Shard {
    std::array<std::atomic<uint64_t>, kBoundsMax + 1> counts{};
    std::atomic<double> sum{0};
  };
  const std::vector<double>& bounds_;
  std::array<Shard, kShards> shards_;
};

// One name with labels. With takes a mutex: callers on a hot path keep what it returns, which lives as long as the
// family.
template <class Instrument>
class Family {
 public:
  using Make = std::unique_ptr<Instrument> (*)();
  Family(const char* name, const char* help, std::vector<std::string> labels, Make make)
      : name_(name), help_(help), labels_(std::move(labels)), make_(make) {}

  // `values` are as many as the labels and bounded in number: never user data.
  Instrument* With(const std::vector<std::string>& values) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Instrument>& child = children_[values];
    if (child == nullptr) child = make_();
    return child.get();
  }

  prometheus::MetricFamily Collect() const {
    prometheus::MetricFamily family;
    family.name = name_;
    family.help = help_;
    family.type = Instrument::kType;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& child : children_) {
      family.metric.emplace_back();
      for (size_t i = 0; i < labels_.size(); ++i) family.metric.back().label.push_back({labels_[i], child.first[i]});
      child.second->Collect(&family.metric.back());
    }
    return family;
  }

 private:
  const char* const name_;
  const char* const help_;
  const std::vector<std::string> labels_;
  const Make make_;
  mutable std::mutex mutex_;
  std::map<std::vector<std::string>, std::unique_ptr<Instrument>> children_;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_INSTRUMENT_H_
