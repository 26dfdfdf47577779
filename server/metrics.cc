#include "server/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

#include "server/machine.h"

namespace sinkhorn {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

// ---- Buckets --------------------------------------------------------------------------------------------------------

const std::vector<double>& SecondsBounds() {  // gRFC A66.
  static const auto* const kBounds =
      new std::vector<double>{.00001, .00005, .0001, .0003, .0006, .0008, .001, .002, .003, .004, .005, .006, .008, .01,
                              .013,   .016,   .02,   .025,  .03,   .04,   .05,  .065, .08,  .1,   .13,  .16,  .2,   .25,
                              .3,     .4,     .5,    .65,   .8,    1,     2,    5,    10,   20,   50,   100};
  return *kBounds;
}

const std::vector<double>& CountBounds() {  // Powers of 2 to a million.
  static const auto* const kBounds = [] {
    auto* bounds = new std::vector<double>;
    for (double bound = 1; bound <= 1 << 20; bound *= 2) bounds->push_back(bound);
    return bounds;
  }();
  return *kBounds;
}

const std::vector<double>& ErrorBounds() {  // Decades.
  static const auto* const kBounds =
      new std::vector<double>{1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  return *kBounds;
}

std::unique_ptr<Counter> NewCounter() { return std::make_unique<Counter>(); }
std::unique_ptr<Histogram> NewSeconds() { return std::make_unique<Histogram>(SecondsBounds()); }
std::unique_ptr<Histogram> NewCount() { return std::make_unique<Histogram>(CountBounds()); }
std::unique_ptr<Histogram> NewError() { return std::make_unique<Histogram>(ErrorBounds()); }

// ---- The process, from /proc ----------------------------------------------------------------------------------------

struct ProcessStat {
  double cpu_seconds = 0, start_seconds_after_boot = 0, resident_bytes = 0;
};

ProcessStat ReadProcessStat() {
  ProcessStat stat;
  std::FILE* file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) return stat;
  char text[1024];
  text[std::fread(text, 1, sizeof(text) - 1, file)] = 0;
  std::fclose(file);
  // Field 2 is the command in parentheses; fields 14, 15, 22 and 24 are user and system ticks, start tick, resident
  // pages.
  const char* command_end = std::strrchr(text, ')');
  if (command_end == nullptr) return stat;
  unsigned long user = 0, system = 0;
  unsigned long long start = 0;
  long resident = 0;
  std::sscanf(command_end + 1,
              " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d %*d %llu %*u %ld", &user,
              &system, &start, &resident);
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  stat.cpu_seconds = static_cast<double>(user + system) / ticks;
  stat.start_seconds_after_boot = static_cast<double>(start) / ticks;
  stat.resident_bytes = static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE));
  return stat;
}

double BootSeconds() {  // Since the epoch.
  std::FILE* file = std::fopen("/proc/stat", "r");
  if (file == nullptr) return 0;
  char line[8192];
  long long boot = 0;
  while (std::fgets(line, sizeof(line), file) != nullptr && std::sscanf(line, "btime %lld", &boot) != 1) {
  }
  std::fclose(file);
  return static_cast<double>(boot);
}

double OpenFileCount() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count - 3;  // ".", ".." and the folder itself.
}

MetricFamily Single(const char* name, const char* help, MetricType type, double value) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  family.metric.emplace_back();
  (type == MetricType::Counter ? family.metric[0].counter.value : family.metric[0].gauge.value) = value;
  return family;
}

void CollectProcess(std::vector<MetricFamily>* families) {
  const ProcessStat stat = ReadProcessStat();
  families->push_back(
      Single("process_cpu_seconds_total", "User and system CPU time spent.", MetricType::Counter, stat.cpu_seconds));
  families->push_back(
      Single("process_resident_memory_bytes", "Resident memory.", MetricType::Gauge, stat.resident_bytes));
  families->push_back(Single("process_open_fds", "Open file descriptors.", MetricType::Gauge, OpenFileCount()));
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  families->push_back(Single("process_max_fds", "File descriptors that it may open.", MetricType::Gauge,
                             static_cast<double>(files.rlim_cur)));
  families->push_back(Single("sinkhorn_memory_limit_bytes",
                             "Memory that the process may take: the container's limit, or the machine's memory.",
                             MetricType::Gauge, static_cast<double>(MemoryLimitBytes())));
  families->push_back(Single("process_start_time_seconds", "Start of the process since the Unix epoch.",
                             MetricType::Gauge, BootSeconds() + stat.start_seconds_after_boot));
}

int ThisShard(int shards) {
  static std::atomic<int> next{0};
  thread_local const int index = next.fetch_add(1, std::memory_order_relaxed);
  return index % shards;
}

}  // namespace

// ---- Histogram ------------------------------------------------------------------------------------------------------

void Histogram::Observe(double value) {
  const size_t bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  Shard& shard = shards_[ThisShard(kShards)];
  shard.counts[bucket].fetch_add(1, std::memory_order_relaxed);
  AtomicAdd(&shard.sum, value);
}

uint64_t Histogram::count() const {
  uint64_t count = 0;
  for (const Shard& shard : shards_) {
    for (const auto& bucket : shard.counts) count += bucket.load(std::memory_order_relaxed);
  }
  return count;
}

void Histogram::Collect(prometheus::ClientMetric* metric) const {
  prometheus::ClientMetric::Histogram* out = &metric->histogram;
  uint64_t cumulative = 0;
  for (size_t i = 0; i <= bounds_.size(); ++i) {
    for (const Shard& shard : shards_) cumulative += shard.counts[i].load(std::memory_order_relaxed);
    out->bucket.push_back({cumulative, i < bounds_.size() ? bounds_[i] : std::numeric_limits<double>::infinity()});
  }
  out->sample_count = cumulative;
  for (const Shard& shard : shards_) out->sample_sum += shard.sum.load(std::memory_order_relaxed);
}

// ---- Names ----------------------------------------------------------------------------------------------------------

Metrics::Metrics()
    : calls_started("grpc_server_call_started_total", "RPCs begun.", {"grpc_method"}, NewCounter),
      call_seconds("grpc_server_call_duration_seconds", "From the start of an RPC to its end.",
                   {"grpc_method", "grpc_status"}, NewSeconds),
      requests_rejected("sinkhorn_requests_rejected_total", "Requests refused before they were queued.", {"reason"},
                        NewCounter),
      requests_abandoned("sinkhorn_requests_abandoned_total",
                         "Accepted requests given up, where they were and why (cancelled or deadline).",
                         {"stage", "cause"}, NewCounter),
      wasted_device_seconds("sinkhorn_wasted_device_seconds_total",
                            "Time that requests which were given up had spent being solved, shared with their batches.",
                            {"cause"}, NewCounter),
      stage_seconds("sinkhorn_stage_duration_seconds", "Where requests spend their time.", {"stage"}, NewSeconds),
      outcomes("sinkhorn_outcomes_total", "How requests ended: the stop reason, or the reason of the error.",
               {"problem", "outcome"}, NewCounter),
      iterations("sinkhorn_iterations", "Iterations of a solved request.", {"problem"}, NewCount),
      marginal_error("sinkhorn_marginal_error", "Larger L1 marginal error of a solved request, in units of mass.",
                     {"problem"}, NewError),
      tenant_requests("sinkhorn_tenant_requests_total",
                      "Requests of a tenant: answered, refused before they were queued, or failed later.",
                      {"tenant", "outcome"}, NewCounter),
      tenant_device_seconds("sinkhorn_tenant_device_seconds_total", "A tenant's share of the time spent in rounds.",
                            {"tenant"}, NewCounter),
      tenant_queue_seconds("sinkhorn_tenant_queue_seconds",
                           "From a request's arrival in the queue to its first launch.", {"tenant"}, NewSeconds),
      batches("sinkhorn_batches_total",
              "Rounds in which a device advanced its resident problems, for each kernel family that took part.",
              {"device", "family"}, NewCounter),
      batch_problems("sinkhorn_batch_problems", "Problems (members of all requests) of a family that shared a round.",
                     {"family"}, NewCount),
      device_busy_seconds("sinkhorn_device_busy_seconds_total", "Time spent in rounds.", {"device"}, NewCounter) {}

void Metrics::AddGauge(std::string name, std::string help, Labels labels, std::function<double()> value) {
  std::lock_guard<std::mutex> lock(mutex_);
  gauges_.push_back({std::move(name), std::move(help), std::move(labels), std::move(value)});
}

void Metrics::CollectGauges(std::vector<MetricFamily>* families) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Gauge& gauge : gauges_) {
    if (families->empty() || families->back().name != gauge.name) {
      families->emplace_back();
      families->back().name = gauge.name;
      families->back().help = gauge.help;
      families->back().type = MetricType::Gauge;
    }
    prometheus::ClientMetric metric;
    for (const auto& label : gauge.labels) metric.label.push_back({label.first, label.second});
    metric.gauge.value = gauge.value();
    families->back().metric.push_back(std::move(metric));
  }
}

std::vector<MetricFamily> Metrics::Collect() const {
  std::vector<MetricFamily> families = {calls_started.Collect(),
                                        call_seconds.Collect(),
                                        requests_rejected.Collect(),
                                        requests_abandoned.Collect(),
                                        wasted_device_seconds.Collect(),
                                        stage_seconds.Collect(),
                                        outcomes.Collect(),
                                        iterations.Collect(),
                                        marginal_error.Collect(),
                                        tenant_requests.Collect(),
                                        tenant_device_seconds.Collect(),
                                        tenant_queue_seconds.Collect(),
                                        batches.Collect(),
                                        batch_problems.Collect(),
                                        device_busy_seconds.Collect()};
  CollectGauges(&families);
  CollectProcess(&families);
  return families;
}

}  // namespace sinkhorn
