#include "client/loadgen/load_report.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/json.h"

namespace sinkhorn::client {
namespace {

constexpr struct {
  const char* name;
  double fraction;
} kPercentiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p999", 0.999}};

// The phases of a request beside its latency, as (name, histogram).
std::vector<std::pair<const char*, const Histogram*>> Phases(const LoadStats& stats) {
  return {
      {"queue", &stats.queue}, {"transfer", &stats.transfer}, {"compute", &stats.compute}, {"outside", &stats.outside}};
}

double PerSecond(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

std::string Mode(const LoadOptions& options) {
  return options.rate > 0
             ? absl::StrFormat("open loop, %g requests/s (Poisson)", options.rate)
             : absl::StrFormat("closed loop, %d client%s", options.clients, options.clients == 1 ? "" : "s");
}

// ---- Text ----

void AppendTimes(const std::string& name, const std::string& rates, const Histogram& ns, std::string* out) {
  absl::StrAppendFormat(out, "%-42s%22s", name, rates);
  for (const auto& percentile : kPercentiles)
    absl::StrAppendFormat(out, " %9.3f", 1e-6 * ns.Percentile(percentile.fraction));
  absl::StrAppendFormat(out, " %9.3f %9.3f\n", 1e-6 * static_cast<double>(ns.max()), 1e-6 * ns.mean());
}

void AppendStats(const std::string& name, const LoadStats& stats, double seconds, std::string* out) {
  const std::string rates =
      absl::StrFormat("%10.1f  %10.1f", PerSecond(stats.latency.count(), seconds), PerSecond(stats.problems, seconds));
  AppendTimes(name, rates, stats.latency, out);
  for (const auto& [phase, histogram] : Phases(stats)) {
    if (histogram->max() > 0) AppendTimes(absl::StrCat("  ", phase), "", *histogram, out);
  }
  absl::StrAppendFormat(out, "%-64s %9d %9d %9d %9d %9d %9.1f\n", "  batch (problems)", stats.batch.Percentile(0.5),
                        stats.batch.Percentile(0.9), stats.batch.Percentile(0.99), stats.batch.Percentile(0.999),
                        stats.batch.max(), stats.batch.mean());
}

std::string ErrorText(const LoadResult& result) {
  std::vector<std::string> parts;
  for (const auto& [name, count] : result.all.errors) parts.push_back(absl::StrCat(name, " ", count));
  if (result.not_sent > 0) parts.push_back(absl::StrCat("not sent (too many in flight) ", result.not_sent));
  return parts.empty() ? "none" : absl::StrJoin(parts, ", ");
}

// ---- JSON ----

std::string HistogramJson(const Histogram& histogram, double unit) {
  std::vector<std::string> members;
  for (const auto& percentile : kPercentiles) {
    members.push_back(absl::StrCat("\"", percentile.name,
                                   "\": ", absl::StrFormat("%.6g", unit * histogram.Percentile(percentile.fraction))));
  }
  members.push_back(absl::StrFormat("\"max\": %.6g", unit * static_cast<double>(histogram.max())));
  members.push_back(absl::StrFormat("\"mean\": %.6g", unit * histogram.mean()));
  return absl::StrCat("{", absl::StrJoin(members, ", "), "}");
}

std::string StatsJson(const LoadStats& stats, double seconds) {
  std::vector<std::string> members = {
      absl::StrCat("\"requests\": ", stats.latency.count()),
      absl::StrCat("\"problems\": ", stats.problems),
      absl::StrFormat("\"requests_per_second\": %.6g", PerSecond(stats.latency.count(), seconds)),
      absl::StrFormat("\"problems_per_second\": %.6g", PerSecond(stats.problems, seconds)),
      absl::StrCat("\"iteration_limit\": ", stats.iteration_limit),
      absl::StrCat("\"iterations\": ", stats.iterations),
      absl::StrCat("\"latency_seconds\": ", HistogramJson(stats.latency, 1e-9)),
  };
  for (const auto& [phase, histogram] : Phases(stats)) {
    members.push_back(absl::StrCat("\"", phase, "_seconds\": ", HistogramJson(*histogram, 1e-9)));
  }
  members.push_back(absl::StrCat("\"batch_problems\": ", HistogramJson(stats.batch, 1)));
  std::vector<std::string> errors;
  for (const auto& [name, count] : stats.errors) errors.push_back(absl::StrCat(JsonString(name), ": ", count));
  members.push_back(absl::StrCat("\"errors\": {", absl::StrJoin(errors, ", "), "}"));
  return absl::StrCat("{", absl::StrJoin(members, ", "), "}");
}

}  // namespace

std::string LoadText(const LoadOptions& options, const LoadResult& result) {
  std::string out = absl::StrFormat(
      "%s at %s; %d connection%s%s, %d thread%s; measured %.2f s after %s of warm-up\n\n", Mode(options),
      options.target, options.connections, options.connections == 1 ? "" : "s", options.stream ? ", a stream each" : "",
      options.threads, options.threads == 1 ? "" : "s", result.seconds, absl::FormatDuration(options.warmup));
  absl::StrAppendFormat(&out, "%-42s%10s  %10s %9s %9s %9s %9s %9s %9s\n", "latency and where it was spent, ms",
                        "requests/s", "problems/s", "p50", "p90", "p99", "p99.9", "max", "mean");
  for (size_t i = 0; i < options.mix.size(); ++i) {
    AppendStats(options.mix[i].name, result.entries[i], result.seconds, &out);
  }
  if (options.mix.size() > 1) AppendStats("all", result.all, result.seconds, &out);
  const double calls = static_cast<double>(std::max<int64_t>(1, result.call_count));
  absl::StrAppendFormat(&out, "\nanswered %d, %d of them at the iteration limit; errors: %s\n",
                        result.all.latency.count(), result.all.iteration_limit, ErrorText(result));
  if (options.verify) absl::StrAppendFormat(&out, "verified: %d wrong answers\n", result.wrong_count);
  for (const std::string& wrong : result.wrong) absl::StrAppend(&out, "  ", wrong, "\n");
  absl::StrAppendFormat(&out, "generator: %.1f us of CPU per request", 1e6 * result.cpu_seconds / calls);
  if (options.rate > 0) {
    absl::StrAppendFormat(&out, "; late by p50 %.3f, p99 %.3f, max %.3f ms (part of the latency)",
                          1e-6 * result.start_delay.Percentile(0.5), 1e-6 * result.start_delay.Percentile(0.99),
                          1e-6 * static_cast<double>(result.start_delay.max()));
  }
  return out + "\n";
}

std::string LoadJson(const LoadOptions& options, const LoadResult& result) {
  std::vector<std::string> entries, wrong;
  for (size_t i = 0; i < options.mix.size(); ++i) {
    entries.push_back(absl::StrCat("{\"name\": ", JsonString(options.mix[i].name),
                                   ", \"stats\": ", StatsJson(result.entries[i], result.seconds), "}"));
  }
  for (const std::string& text : result.wrong) wrong.push_back(JsonString(text));
  const double calls = static_cast<double>(std::max<int64_t>(1, result.call_count));
  return absl::StrCat("{\"mode\": ", options.rate > 0 ? "\"open\"" : "\"closed\"", ", \"clients\": ", options.clients,
                      ", \"rate\": ", options.rate, ", \"connections\": ", options.connections,
                      ", \"stream\": ", options.stream ? "true" : "false", ", \"threads\": ", options.threads,
                      ", \"seconds\": ", JsonNumber(result.seconds),
                      ", \"all\": ", StatsJson(result.all, result.seconds), ", \"entries\": [",
                      absl::StrJoin(entries, ", "), "], \"not_sent\": ", result.not_sent,
                      ", \"verified\": ", options.verify ? "true" : "false", ", \"wrong_count\": ", result.wrong_count,
                      ", \"wrong\": [", absl::StrJoin(wrong, ", "),
                      "], \"start_delay_seconds\": ", HistogramJson(result.start_delay, 1e-9),
                      ", \"generator_cpu_seconds_per_request\": ", JsonNumber(result.cpu_seconds / calls), "}\n");
}

}  // namespace sinkhorn::client
