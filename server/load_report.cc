#include "server/load_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace sinkhorn {

using xds::data::orca::v3::OrcaLoadReport;

LoadReport::LoadReport(Sources sources, absl::Time now)
    : sources_(std::move(sources)),
      due_ns_(absl::ToUnixNanos(now + kRefresh)),
      common_(std::make_shared<const std::string>()),
      last_(now),
      totals_(Totals()) {}

LoadReport::Rates LoadReport::Totals() const {
  return {sources_.busy_seconds(), sources_.cpu_seconds(), static_cast<double>(answered_.load()),
          static_cast<double>(failed_.load())};
}

void LoadReport::Refresh(absl::Time now) {
  const double seconds = absl::ToDoubleSeconds(now - last_);
  if (seconds <= 0) return;
  const Rates totals = Totals();
  // The first report is of what there was until then.
  const double fresh =
      rates_.answered + rates_.failed == 0 ? 1 : -std::expm1(-seconds / absl::ToDoubleSeconds(kFading));
  for (double Rates::*of : {&Rates::busy, &Rates::cpu, &Rates::answered, &Rates::failed}) {
    rates_.*of += fresh * ((totals.*of - totals_.*of) / seconds - rates_.*of);
  }
  last_ = now;
  totals_ = totals;

  OrcaLoadReport report;
  report.set_application_utilization(rates_.busy / sources_.lanes);
  report.set_cpu_utilization(rates_.cpu / sources_.cores);
  report.set_rps_fractional(rates_.answered);
  report.set_eps(rates_.failed);
  (*report.mutable_named_metrics())["backlog_seconds"] = sources_.backlog_seconds();
  std::atomic_store(&common_, std::make_shared<const std::string>(report.SerializeAsString()));
}

std::string LoadReport::Of(Outcome outcome, double device_seconds, absl::Time now) {
  if (outcome == Outcome::kAnswered) answered_.fetch_add(1, std::memory_order_relaxed);
  if (outcome == Outcome::kFailed) failed_.fetch_add(1, std::memory_order_relaxed);
  if (absl::ToUnixNanos(now) >= due_ns_.load(std::memory_order_relaxed) && !refreshing_.exchange(true)) {
    Refresh(now);
    due_ns_.store(absl::ToUnixNanos(now + kRefresh), std::memory_order_relaxed);
    refreshing_.store(false);
  }
  std::string value = *std::atomic_load(&common_);
  if (device_seconds > 0) {  // Messages written one after the other are one message.
    OrcaLoadReport cost;
    (*cost.mutable_request_cost())["device_seconds"] = device_seconds;
    cost.AppendToString(&value);
  }
  return value;
}

}  // namespace sinkhorn
