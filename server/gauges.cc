#include "server/gauges.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/machine.h"

// gperftools' C interface, there if the binary is linked with it.
extern "C" {
__attribute__((weak)) int MallocExtension_GetNumericProperty(const char* property, size_t* value);
__attribute__((weak)) void MallocExtension_ReleaseFreeMemory(void);
}

namespace sinkhorn {
namespace {

#if defined(__x86_64__)
constexpr char kArchitecture[] = "x86_64";
#elif defined(__aarch64__)
constexpr char kArchitecture[] = "aarch64";
#else
constexpr char kArchitecture[] = "other";
#endif

// A bounded label: the backend and the device's index, not its name.
std::string DeviceLabel(const DeviceDescription& device) { return absl::StrCat(device.backend, ":", device.index); }

void AddStateGauges(const SinkhornServer* server, Metrics* metrics) {
  const struct {
    const char* name;
    ServiceState state;
  } states[] = {{"warming", ServiceState::kWarming},
                {"ready", ServiceState::kReady},
                {"draining", ServiceState::kDraining},
                {"stopping", ServiceState::kStopping}};
  for (const auto& entry : states) {
    const ServiceState state = entry.state;
    metrics->AddGauge("sinkhorn_server_state", "1 for the state that the server is in.", {{"state", entry.name}},
                      [server, state] { return server->state() == state ? 1 : 0; });
  }
  metrics->AddGauge("sinkhorn_requests_in_flight", "Requests between arrival and answer.", {},
                    [server] { return static_cast<double>(server->requests_in_flight()); });
  metrics->AddGauge("sinkhorn_tenants", "Callers that are told apart: by certificate, token or address.", {},
                    [server] { return static_cast<double>(server->tenants()); });
  metrics->AddGauge("sinkhorn_requests_held_bytes", "Memory of requests and replies, from arrival until they are sent.",
                    {}, [server] { return static_cast<double>(server->held_bytes()); });
}

// Of gperftools' allocator; 0 with another one.
double HeapBytes(const char* property) {
  size_t value = 0;
  if (MallocExtension_GetNumericProperty == nullptr || !MallocExtension_GetNumericProperty(property, &value)) return 0;
  return static_cast<double>(value);
}

// What is free goes back to the system when it is looked at and nobody has called since the last look.
void AddHeapGauges(const SinkhornServer* server, Metrics* metrics) {
  constexpr char kHeap[] = "sinkhorn_heap_bytes";
  metrics->AddGauge(kHeap, "The allocator's memory: in use, and free but kept. Backends' pools are not part of it.",
                    {{"use", "live"}}, [] { return HeapBytes("generic.current_allocated_bytes"); });
  const Counter* started = metrics->calls_started.With({"sinkhorn.v1.SinkhornService/Solve"});
  const auto last = std::make_shared<std::atomic<double>>(-1);
  metrics->AddGauge(kHeap, "", {{"use", "free"}}, [server, started, last] {
    const double calls = started->value();
    const bool idle = last->exchange(calls) == calls && server->requests_in_flight() == 0;
    if (idle && MallocExtension_ReleaseFreeMemory != nullptr) MallocExtension_ReleaseFreeMemory();
    return HeapBytes("generic.heap_size") - HeapBytes("generic.current_allocated_bytes") -
           HeapBytes("tcmalloc.pageheap_unmapped_bytes");
  });
}

// The queue is the server's: the devices' together.
void AddQueueGauges(const Executors* executors, Metrics* metrics) {
  const auto add = [&](const char* name, const char* help, auto value, auto combine) {
    metrics->AddGauge(name, help, {}, [executors, value, combine] {
      double all = 0;
      for (const Executor& executor : executors->all()) all = combine(all, value(executor.scheduler->stats()));
      return all;
    });
  };
  const auto sum = [](double a, double b) { return a + b; };
  const auto most = [](double a, double b) { return std::max(a, b); };
  using Stats = const SchedulerStats&;
  add(
      "sinkhorn_queue_requests", "Requests that wait for a device.",
      [](Stats stats) { return static_cast<double>(stats.queue_requests); }, sum);
  add(
      "sinkhorn_queue_bytes", "Bytes of inputs and outputs of the requests that wait.",
      [](Stats stats) { return static_cast<double>(stats.queue_bytes); }, sum);
  add(
      "sinkhorn_queue_predicted_seconds",
      "Predicted device time of the requests that wait, for a device or for their turn on it; of several devices, the "
      "longest.",
      [](Stats stats) { return stats.queue_predicted_seconds; }, most);
  add(
      "sinkhorn_backlog_predicted_seconds",
      "Predicted device time of all accepted requests that are not finished; of several devices, the longest.",
      [](Stats stats) { return stats.backlog_predicted_seconds; }, most);
  add(
      "sinkhorn_queue_oldest_age_seconds", "How long the oldest of them has waited.",
      [](Stats stats) { return absl::ToDoubleSeconds(stats.queue_oldest_age); }, most);
}

void AddDeviceGauges(const Executors* executors, Metrics* metrics) {
  constexpr char kMemory[] = "sinkhorn_device_memory_bytes";
  for (const Executor& executor : executors->all()) {
    const std::string label = DeviceLabel(executor.device);
    metrics->AddGauge(kMemory,
                      "Memory by use: 'total' of the device, 'requests' waiting or resident, and the backend's pools.",
                      {{"device", label}, {"pool", "total"}},
                      [bytes = executor.device.memory_bytes] { return static_cast<double>(bytes); });
    metrics->AddGauge(kMemory, "", {{"device", label}, {"pool", "requests"}},
                      [&executor] { return static_cast<double>(executor.scheduler->stats().bytes); });
    const size_t pools = executor.backend->memory().size();
    for (size_t i = 0; i < pools; ++i) {
      metrics->AddGauge(kMemory, "", {{"device", label}, {"pool", executor.backend->memory()[i].pool}},
                        [&executor, i] { return static_cast<double>(executor.backend->memory()[i].bytes); });
    }
  }
  for (const Executor& executor : executors->all()) {
    metrics->AddGauge("sinkhorn_device_healthy", "1 unless the device is lost.",
                      {{"device", DeviceLabel(executor.device)}},
                      [&executor] { return executor.scheduler->stats().device_lost ? 0 : 1; });
  }
}

}  // namespace

void AddServerGauges(const SinkhornServer* server, const Executors* executors, const BuildInfo& build,
                     Metrics* metrics) {
  metrics->AddGauge("sinkhorn_build_info", "What is running; always 1.",
                    {{"version", build.version},
                     {"commit", build.commit},
                     {"cuda", build.cuda ? "yes" : "no"},
                     {"arch", kArchitecture}},
                    [] { return 1; });
  AddStateGauges(server, metrics);
  AddHeapGauges(server, metrics);
  AddQueueGauges(executors, metrics);
  AddDeviceGauges(executors, metrics);
}

std::shared_ptr<LoadReport> MakeLoadReport(const Executors* executors, Metrics* metrics) {
  LoadReport::Sources sources;
  std::vector<const Counter*> busy;
  sources.lanes = 0;
  for (const Executor& executor : executors->all()) {
    busy.push_back(metrics->device_busy_seconds.With({DeviceLabel(executor.device)}));
    sources.lanes += std::max(1, executor.backend->lanes());
  }
  sources.busy_seconds = [busy] {
    double all = 0;
    for (const Counter* counter : busy) all += counter->value();
    return all;
  };
  sources.backlog_seconds = [executors] {
    double all = 0;
    for (const Executor& executor : executors->all()) all += executor.scheduler->LoadSeconds();
    return all / static_cast<double>(executors->all().size());
  };
  sources.cpu_seconds = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  sources.cores = AvailableCores();
  return std::make_shared<LoadReport>(std::move(sources), absl::Now());
}

std::function<void(const RoundInfo&)> RoundCounter(const Backend& backend, Metrics* metrics) {
  // What a lane has met so far: its thread alone looks there, and finds no lock.
  struct Entry {
    const char* family;
    Counter* batches;
    Histogram* problems;
  };
  const auto lanes = std::make_shared<std::vector<std::vector<Entry>>>(std::max(1, backend.lanes()));
  const std::string label = DeviceLabel(backend.device());
  Counter* busy = metrics->device_busy_seconds.With({label});
  return [lanes, label, busy, metrics](const RoundInfo& round) {
    busy->Add(round.seconds);
    std::vector<Entry>& seen = (*lanes)[round.lane];
    for (const RoundInfo::Share& share : round.families) {
      auto entry = std::find_if(seen.begin(), seen.end(), [&](const Entry& e) { return e.family == share.family; });
      if (entry == seen.end()) {
        const std::string name = *share.family != 0 ? share.family : "all";
        entry = seen.insert(entry,
                            {share.family, metrics->batches.With({label, name}), metrics->batch_problems.With({name})});
      }
      entry->batches->Add();
      entry->problems->Observe(static_cast<double>(share.problem_count));
    }
  };
}

}  // namespace sinkhorn
