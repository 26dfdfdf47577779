#include "server/service_context.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/log.h"

namespace sinkhorn {

namespace {

// Reasons of errors (status.h): those that a request may get before it is queued, and later.
constexpr const char* kRejected[] = {"INVALID_FIELD", "PROBLEM_TOO_LARGE", "QUEUE_FULL",  "INFEASIBLE_DEADLINE",
                                     "WARMING",       "DRAINING",          "DEVICE_LOST", "DEVICE_MEMORY",
                                     "INTERNAL",      "UNAUTHENTICATED",   "UNSUPPORTED"};
constexpr const char* kFailed[] = {"EXPIRED", "CANCELLED", "DIVERGED"};

// Makes what is known in advance: a rate of a counter that first appears at 1 misses that one.
void MakeCounters(Metrics* metrics) {
  for (const char* method : {kSolveMethod, kSolveStreamMethod, kGetServerInfoMethod}) {
    metrics->calls_started.With({method});
    metrics->call_seconds.With({method, "OK"});
  }
  for (const char* cause : {"cancelled", "deadline"}) {
    for (const char* stage : {"decode", "queue", "running"}) metrics->requests_abandoned.With({stage, cause});
    metrics->wasted_device_seconds.With({cause});
  }
  for (const char* reason : kRejected) metrics->requests_rejected.With({reason});
  for (const char* problem : {"none", KindName(ProblemKind::kNormalization), KindName(ProblemKind::kDense),
                              KindName(ProblemKind::kPointCloud)}) {
    for (const char* reason : kRejected) metrics->outcomes.With({problem, reason});
    for (const char* reason : kFailed) metrics->outcomes.With({problem, reason});
  }
}

}  // namespace

TenantMetrics::TenantMetrics(Metrics* metrics, const std::string& label)
    : answered(metrics->tenant_requests.With({label, "answered"})),
      refused(metrics->tenant_requests.With({label, "refused"})),
      failed(metrics->tenant_requests.With({label, "failed"})),
      device_seconds(metrics->tenant_device_seconds.With({label})),
      queue_seconds(metrics->tenant_queue_seconds.With({label})) {}

ServiceContext::ServiceContext(const Executors* executors, Metrics* metrics, const ServiceOptions& options)
    : executors(executors),
      metrics(metrics),
      options(options),
      solve_started(metrics->calls_started.With({kSolveMethod})),
      solve_ok_seconds(metrics->call_seconds.With({kSolveMethod, "OK"})),
      decode_seconds(metrics->stage_seconds.With({"decode"})),
      queue_seconds(metrics->stage_seconds.With({"queue"})),
      h2d_seconds(metrics->stage_seconds.With({"h2d"})),
      solve_seconds(metrics->stage_seconds.With({"solve"})),
      d2h_seconds(metrics->stage_seconds.With({"d2h"})),
      encode_seconds(metrics->stage_seconds.With({"encode"})),
      next_incident_(absl::Uniform<uint64_t>(absl::BitGen())),
      pool_(options.threads, /*allow_spinning=*/false) {
  MakeCounters(metrics);
  const int labels = static_cast<int>(options.tenants->labels().size());
  for (int label = 0; label < labels; ++label) MetricsOf({0, 1, label});
  for (ProblemKind kind : {ProblemKind::kNormalization, ProblemKind::kDense, ProblemKind::kPointCloud}) {
    SolvedMetrics* of_kind = &solved[static_cast<int>(kind)];
    of_kind->iterations = metrics->iterations.With({KindName(kind)});
    of_kind->marginal_error = metrics->marginal_error.With({KindName(kind)});
    for (int reason = 0; reason < kStopReasons; ++reason) {
      of_kind->outcomes[reason] =
          metrics->outcomes.With({KindName(kind), OutcomeName(static_cast<StopReason>(reason))});
    }
  }
}

bool ServiceContext::TrySchedule(std::function<void()> work) {
  // Below the capacity of each of the pool's queues: a full one would run the work on the calling thread.
  if (pending_.fetch_add(1) >= std::min<int64_t>(options.max_pending_decodes, 1000)) {
    pending_.fetch_sub(1);
    return false;
  }
  pool_.Schedule([this, work = std::move(work)] {
    pending_.fetch_sub(1);
    work();
  });
  return true;
}

bool ServiceContext::TryHold(int64_t bytes, HeldBytes* held) {
  if (held_->fetch_add(bytes) + bytes > options.queue.max_queue_bytes) {
    held_->fetch_sub(bytes);
    return false;
  }
  held->total_ = held_;
  held->bytes_ = bytes;
  return true;
}

bool ServiceContext::Allow(const grpc::ServerContextBase& rpc) {
  if (options.tokens == nullptr) return true;
  const auto header = rpc.client_metadata().find("authorization");
  const bool none = header == rpc.client_metadata().end();
  if (!none && options.tokens->Allow({header->second.data(), header->second.size()})) return true;
  if (const int64_t calls = strangers_.Pass()) {
    Log(Severity::kWarning, "unauthenticated",
        {{"peer", rpc.peer()}, {"why", none ? "no token" : "wrong token"}, {"calls", absl::StrCat(calls)}});
  }
  return false;
}

// By what has been checked: a certificate, a token, or where the call comes from.
Tenant ServiceContext::TenantOf(const grpc::ServerContextBase& rpc) {
  const absl::Time now = absl::Now();
  const auto peer = rpc.auth_context();
  if (peer != nullptr && peer->IsPeerAuthenticated()) {
    // A workload's certificate may have no subject, but a name such as spiffe://cluster/trainer.
    for (const char* property : {GRPC_X509_SUBJECT_PROPERTY_NAME, GRPC_X509_SAN_PROPERTY_NAME}) {
      const std::vector<grpc::string_ref> names = peer->FindPropertyValues(property);
      if (names.empty() || names[0].empty()) continue;
      return options.tenants->Of(absl::StrCat("cert:", absl::string_view(names[0].data(), names[0].size())), now);
    }
  }
  if (options.tokens != nullptr) {
    const auto header = rpc.client_metadata().find("authorization");
    if (header != rpc.client_metadata().end()) {
      return options.tenants->Of(TokenIdentity(Tokens::In({header->second.data(), header->second.size()})), now);
    }
  }
  return options.tenants->Of(PeerIdentity(rpc.peer()), now);
}

const TenantMetrics& ServiceContext::MetricsOf(const Tenant& tenant) {
  std::atomic<const TenantMetrics*>& made = tenants_[tenant.label];
  if (const TenantMetrics* known = made.load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(tenants_mutex_);
  std::unique_ptr<const TenantMetrics>& owned = tenants_made_[tenant.label];
  if (owned == nullptr) {
    owned = std::make_unique<const TenantMetrics>(metrics, options.tenants->labels()[tenant.label]);
    made.store(owned.get(), std::memory_order_release);
  }
  return *owned;
}

void ServiceContext::DeviceLost() {
  if (device_lost_.exchange(true)) return;
  if (options.on_device_lost) options.on_device_lost();
}

void ServiceContext::ReportLoad(grpc::StatusCode code, double device_seconds, grpc::ServerContextBase* rpc) {
  if (options.load_report == nullptr) return;
  const bool ours = code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::RESOURCE_EXHAUSTED ||
                    code == grpc::StatusCode::INTERNAL;
  const auto outcome = code == grpc::StatusCode::OK ? LoadReport::Outcome::kAnswered
                       : ours                       ? LoadReport::Outcome::kFailed
                                                    : LoadReport::Outcome::kRefused;
  rpc->AddTrailingMetadata(LoadReport::kTrailer, options.load_report->Of(outcome, device_seconds, absl::Now()));
}

void ServiceContext::CallFinished(grpc::StatusCode code, absl::Duration duration) {
  Histogram* seconds =
      code == grpc::StatusCode::OK ? solve_ok_seconds : metrics->call_seconds.With({kSolveMethod, GrpcCodeName(code)});
  seconds->Observe(absl::ToDoubleSeconds(duration));
}

Error ServiceContext::Incident(absl::string_view request_id, absl::string_view what) {
  const std::string incident = absl::StrFormat("%016x", next_incident_.fetch_add(1));
  Log(Severity::kError, "incident",
      {{"incident", incident}, {"request_id", std::string(request_id)}, {"what", std::string(what)}});
  return Internal(incident);
}

// ---- Names ----------------------------------------------------------------------------------------------------------

const char* KindName(ProblemKind kind) {
  switch (kind) {
    case ProblemKind::kNormalization:
      return "normalization";
    case ProblemKind::kDense:
      return "dense";
    case ProblemKind::kPointCloud:
      return "point_cloud";
  }
  return "";
}

const char* OutcomeName(StopReason reason) {
  switch (reason) {
    case StopReason::kTolerance:
      return "TOLERANCE";
    case StopReason::kMaxIterations:
      return "MAX_ITERATIONS";
    case StopReason::kPrecision:
      return "PRECISION";
    case StopReason::kNotIterated:
      return "NOT_ITERATED";
    case StopReason::kTimeBudget:
      return "TIME_BUDGET";
  }
  return "";
}

const char* GrpcCodeName(grpc::StatusCode code) {
  static const char* const kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return code >= 0 && code <= 16 ? kNames[code] : "UNKNOWN";
}

}  // namespace sinkhorn
