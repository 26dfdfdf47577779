// sinkhorn: the service from the command line.
//
//   sinkhorn solve   one problem from files or numbers
//   sinkhorn info    what the server is and can do
//   sinkhorn health  whether it takes solves, as the exit code
//   sinkhorn version
//
// Answers go to stdout, errors and progress to stderr. Exit codes: exit_codes.h.
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cli/connection.h"
#include "client/cli/exit_codes.h"
#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/solve_report.h"
#include "client/cli/solve_request.h"
#include "client/cpp/client.h"

ABSL_FLAG(
    absl::Duration, timeout, absl::Seconds(60),
    "Deadline of the whole command, such as 5s or 10m; inf: none. The server gives up a problem that cannot meet it.");
ABSL_FLAG(bool, wait, false, "solve, health: wait, up to --timeout, until the server is there and ready.");
ABSL_FLAG(bool, json, false, "Print one JSON object instead of text (errors too).");
ABSL_FLAG(std::string, out, "", "solve: directory for the outputs as .npy files; made if it is not there.");
ABSL_FLAG(bool, require_converged, false, "solve: exit code 5 if the answer does not meet the tolerance.");
ABSL_FLAG(std::string, service, sinkhorn::client::kServiceName, "health: name to ask for, such as liveness.");

namespace sinkhorn::client {
namespace {

constexpr char kVersion[] = "0.1.0";

constexpr char kUsage[] = R"(solves entropic optimal-transport problems on a Sinkhorn server.

  sinkhorn solve --logits=W.npy [--recipe=...] [--max_iterations=...] [--cotangent=G.npy]
  sinkhorn solve --cost=C.npy --epsilon=0.1 [--a=a.npy] [--b=b.npy]
  sinkhorn solve --x=x.npy --y=y.npy --cost_function=squared_euclidean --epsilon=0.05 [--outputs=value,plan] [--out=DIR]
  sinkhorn info | health | version

Arrays are .npy files, text files (.csv, .tsv, .txt) or numbers: --cost="0,1;1,0".
Exit codes: 0 done; 1 wrong command line or file; 2 refused by the server; 3 no server, not ready or full; 4 timeout;
5 not converged (with --require_converged).)";

int Fail(const absl::Status& status, ExitCode code) {
  if (absl::GetFlag(FLAGS_json)) std::fputs(ErrorJson(status).c_str(), stdout);
  std::fprintf(stderr, "sinkhorn: %s\n", Describe(status).c_str());
  for (const FieldViolation& violation : GetErrorDetails(status).fields) {
    // The message says it already for the first field; further ones would be lost.
    if (absl::StrContains(status.message(), violation.description)) continue;
    std::fprintf(stderr, "  %s: %s\n", violation.field.c_str(), violation.description.c_str());
  }
  return code;
}

int FailUsage(const absl::Status& status) {
  if (absl::GetFlag(FLAGS_json)) std::fputs(ErrorJson(status).c_str(), stdout);
  std::fprintf(stderr, "sinkhorn: %s\n", std::string(status.message()).c_str());
  return kExitUsage;
}

int FailCall(absl::Status status) {
  if (status.code() == absl::StatusCode::kUnavailable && GetErrorDetails(status).reason.empty()) {
    status = absl::UnavailableError(absl::StrCat("no server at ", ServerTarget(), " (", status.message(), ")"));
  }
  return Fail(status, ExitCodeOf(status));
}

// One client of the server that the flags name, and the command's deadline.
struct Session {
  std::unique_ptr<Client> client;
  absl::Time deadline;
};

absl::StatusOr<Session> Connect() {
  const absl::StatusOr<ClientOptions> options = ConnectionOptions();
  if (!options.ok()) return options.status();
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(ServerTarget(), *options);
  if (!client.ok()) return client.status();
  return Session{*std::move(client), absl::Now() + absl::GetFlag(FLAGS_timeout)};
}

// ---- Commands ----

int Solve() {
  const absl::StatusOr<v1::SolveRequest> request = RequestFromFlags();
  if (!request.ok()) return FailUsage(request.status());
  const absl::StatusOr<Session> session = Connect();
  if (!session.ok()) return FailUsage(session.status());
  if (absl::GetFlag(FLAGS_wait)) {
    if (absl::Status ready = session->client->WaitForReady(session->deadline); !ready.ok()) return FailCall(ready);
  }

  const absl::Time start = absl::Now();
  absl::Notification done;
  absl::StatusOr<v1::SolveResponse> response;
  session->client->SolveAsync(v1::SolveRequest(*request), session->deadline,
                              [&](absl::StatusOr<v1::SolveResponse> result) {
                                response = std::move(result);
                                done.Notify();
                              });
  WaitWithProgress("solving", absl::GetFlag(FLAGS_timeout), done);
  const absl::Duration round_trip = absl::Now() - start;
  if (!response.ok()) return FailCall(response.status());

  SavedFiles saved;
  if (const std::string directory = absl::GetFlag(FLAGS_out); !directory.empty()) {
    absl::StatusOr<SavedFiles> files = SaveOutputs(*response, directory);
    if (!files.ok()) return FailUsage(files.status());
    saved = *std::move(files);
  }
  const std::string report = absl::GetFlag(FLAGS_json) ? SolveJson(*response, round_trip, saved)
                                                       : Summary(*request, *response, round_trip, saved);
  std::fputs(report.c_str(), stdout);
  return absl::GetFlag(FLAGS_require_converged) && !response->convergence().converged() ? kExitNotConverged : kExitOk;
}

std::string InfoText(const v1::GetServerInfoResponse& info) {
  std::string out;
  const auto line = [&out](absl::string_view name, const std::string& text) {
    absl::StrAppendFormat(&out, "%-24s %s\n", name, text);
  };
  line("server", ServerTarget());
  line("version", info.commit().empty() ? info.version() : absl::StrCat(info.version(), " (", info.commit(), ")"));
  line("state", info.state());
  line("uptime", absl::FormatDuration(absl::Seconds(static_cast<int64_t>(info.uptime_seconds()))));
  line("requests in flight", absl::StrCat(info.requests_in_flight()));
  for (const v1::Device& device : info.devices()) {
    line("device", absl::StrFormat("%s (%s, %.1f GiB)", device.name(), device.backend(),
                                   static_cast<double>(device.memory_bytes()) / (int64_t{1} << 30)));
  }
  const v1::Limits& limits = info.limits();
  line("max points", absl::StrCat(limits.max_points()));
  line("max dimension", absl::StrCat(limits.max_dimension()));
  line("max matrix elements", absl::StrCat(limits.max_matrix_elements()));
  line("max members", absl::StrCat(limits.max_members()));
  line("max iterations", absl::StrCat(limits.max_iterations()));
  line("max request bytes", absl::StrCat(limits.max_receive_message_bytes()));
  line("max reply bytes", absl::StrCat(limits.max_reply_bytes()));
  line("max queue", absl::StrCat(limits.max_queue_requests(), " requests, ", limits.max_queue_bytes(), " bytes"));
  return out;
}

int Info() {
  const absl::StatusOr<Session> session = Connect();
  if (!session.ok()) return FailUsage(session.status());
  const absl::StatusOr<v1::GetServerInfoResponse> info = session->client->GetServerInfo(session->deadline);
  if (!info.ok()) return FailCall(info.status());
  const std::string text = absl::GetFlag(FLAGS_json) ? absl::StrCat("{", JsonMembers(*info), "}\n") : InfoText(*info);
  std::fputs(text.c_str(), stdout);
  return kExitOk;
}

int Health() {
  const absl::StatusOr<Session> session = Connect();
  if (!session.ok()) return FailUsage(session.status());
  if (absl::GetFlag(FLAGS_wait)) {
    if (absl::Status ready = session->client->WaitForReady(session->deadline); !ready.ok()) return FailCall(ready);
  }
  const absl::StatusOr<bool> serving = session->client->CheckHealth(session->deadline, absl::GetFlag(FLAGS_service));
  if (!serving.ok()) return FailCall(serving.status());
  const char* text = *serving ? "SERVING" : "NOT_SERVING";
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("{\"status\": \"%s\"}\n", text);
  } else {
    std::printf("%s\n", text);
  }
  return *serving ? kExitOk : kExitUnavailable;
}

int Version() {
  std::printf("sinkhorn %s\n", kVersion);
  return kExitOk;
}

int Main(int argc, char** argv) {
  absl::FlagsUsageConfig config;
  const auto ours = [](absl::string_view file) { return absl::StrContains(file, "client/cli/"); };
  config.contains_helpshort_flags = config.contains_help_flags = config.contains_helppackage_flags = ours;
  config.version_string = [] { return absl::StrCat("sinkhorn ", kVersion, "\n"); };
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage(kUsage);
  std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  arguments.erase(arguments.begin());

  if (arguments.empty()) {
    std::fprintf(stderr, "sinkhorn: %s\n\nsinkhorn --help lists all flags.\n", kUsage);
    return kExitUsage;
  }
  const std::string command = arguments[0];
  if (arguments.size() > 1) {
    return FailUsage(absl::InvalidArgumentError(
        absl::StrCat("unexpected argument ", arguments[1], ": inputs are flags, such as --cost=cost.npy")));
  }
  if (command == "solve") return Solve();
  if (command == "info") return Info();
  if (command == "health") return Health();
  if (command == "version") return Version();
  return FailUsage(
      absl::InvalidArgumentError(absl::StrCat("unknown command ", command, ": solve, info, health or version")));
}

}  // namespace
}  // namespace sinkhorn::client

int main(int argc, char** argv) { return sinkhorn::client::Main(argc, argv); }
