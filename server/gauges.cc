#include "server/gauges.h"

#include "absl/strings/str_cat.h"

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
std::string DeviceLabel(const DeviceDescription& device) { return absl::StrCat(device.backend, ":0"); }

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
  metrics->AddGauge("sinkhorn_requests_held_bytes", "Memory of requests and replies, from arrival until they are sent.",
                    {}, [server] { return static_cast<double>(server->held_bytes()); });
}

void AddQueueGauges(const Scheduler* scheduler, Metrics* metrics) {
  metrics->AddGauge("sinkhorn_queue_requests", "Requests that wait for the device.", {},
                    [scheduler] { return static_cast<double>(scheduler->stats().queue_requests); });
  metrics->AddGauge("sinkhorn_queue_bytes", "Bytes of inputs and outputs of the requests that wait.", {},
                    [scheduler] { return static_cast<double>(scheduler->stats().queue_bytes); });
  metrics->AddGauge("sinkhorn_queue_predicted_seconds", "Predicted device time of the requests that wait.", {},
                    [scheduler] { return scheduler->stats().queue_predicted_seconds; });
  metrics->AddGauge("sinkhorn_queue_oldest_age_seconds", "How long the oldest of them has waited.", {},
                    [scheduler] { return absl::ToDoubleSeconds(scheduler->stats().queue_oldest_age); });
}

void AddDeviceGauges(const SinkhornServer* server, const Scheduler* scheduler, const DeviceDescription& device,
                     Metrics* metrics) {
  const std::string label = DeviceLabel(device);
  metrics->AddGauge(
      "sinkhorn_device_memory_bytes", "Memory by use: 'total' of the device, 'requests' waiting or resident.",
      {{"device", label}, {"pool", "total"}}, [bytes = device.memory_bytes] { return static_cast<double>(bytes); });
  metrics->AddGauge("sinkhorn_device_memory_bytes", "", {{"device", label}, {"pool", "requests"}},
                    [scheduler] { return static_cast<double>(scheduler->stats().bytes); });
  metrics->AddGauge("sinkhorn_device_healthy", "1 unless the device is lost.", {{"device", label}},
                    [server] { return server->device_lost() ? 0 : 1; });
}

}  // namespace

void AddServerGauges(const SinkhornServer* server, const Scheduler* scheduler, const DeviceDescription& device,
                     const BuildInfo& build, Metrics* metrics) {
  metrics->AddGauge("sinkhorn_build_info", "What is running; always 1.",
                    {{"version", build.version},
                     {"commit", build.commit},
                     {"cuda", build.cuda ? "yes" : "no"},
                     {"arch", kArchitecture}},
                    [] { return 1; });
  AddStateGauges(server, metrics);
  AddQueueGauges(scheduler, metrics);
  AddDeviceGauges(server, scheduler, device, metrics);
}

std::function<void(const RoundInfo&)> RoundCounter(const DeviceDescription& device, Metrics* metrics) {
  // A round mixes families: that is the point of it.
  const std::string label = DeviceLabel(device);
  Counter* batches = metrics->batches.With({label, "all"});
  Histogram* problems = metrics->batch_problems.With({"all"});
  Counter* busy = metrics->device_busy_seconds.With({label});
  return [batches, problems, busy](const RoundInfo& round) {
    batches->Add();
    problems->Observe(static_cast<double>(round.problem_count));
    busy->Add(round.seconds);
  };
}

}  // namespace sinkhorn
