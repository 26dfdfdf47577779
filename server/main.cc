// The server: flags -> backend -> scheduler -> service -> gRPC, and a clean way out.
//
// Start: listens at once but refuses solves (WARMING) until the golden problems are solved right. Stop (SIGTERM or
// SIGINT): health says NOT_SERVING and requests are still taken for --drain_grace; then they are refused, what was
// accepted has --drain_timeout to finish, and the process exits 0. A second signal exits at once. A lost device: exit
// 1.
#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/config.h"
#include "server/executors.h"
#include "server/fault.h"
#include "server/gauges.h"
#include "server/golden.h"
#include "server/grpc_log.h"
#include "server/health.h"
#include "server/log.h"
#include "server/machine.h"
#include "server/metrics.h"
#include "server/scheduler.h"
#include "server/service.h"
#include "server/web.h"

#if SINKHORN_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device.h"
#endif

namespace sinkhorn {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitSecondSignal = 143;  // 128 + SIGTERM.
constexpr int kDeviceLostSignal = SIGUSR1;
constexpr absl::Duration kGoldenTimeout = absl::Seconds(60);
// Before the server goes there should be a silence, in which clients that hear that it drains have gone elsewhere. But
// no longer wait than this: while it refuses, clients that take replicas in turns come back with each attempt, and five
// are over in 1.5 s.
constexpr absl::Duration kSilence = absl::Milliseconds(200);
constexpr absl::Duration kSilenceTimeout = absl::Milliseconds(500);
constexpr absl::Duration kFlushTimeout = absl::Seconds(2);  // For replies still being sent when all is answered.
constexpr int kCertificateRefreshSeconds = 2;

// ---- Devices --------------------------------------------------------------------------------------------------------

using Backends = std::vector<std::unique_ptr<Backend>>;

// One for each of the devices that --devices names. NOT_FOUND: this machine or this build has none.
absl::StatusOr<Backends> MakeCudaBackends(const CudaFlags& flags, const Faults& faults) {
#if SINKHORN_HAVE_CUDA
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);  // Or each kernel's first request waits for its code.
  const auto devices = ListDevices();
  if (!devices.ok()) return absl::NotFoundError(devices.status().message());
  if (devices->empty()) return absl::NotFoundError("no CUDA device found");
  std::vector<int> indices = flags.devices;
  for (size_t i = 0; flags.devices.empty() && i < devices->size(); ++i) indices.push_back(static_cast<int>(i));
  CudaBackendOptions options;
  options.lanes = flags.lanes;
  options.memory_bytes = flags.memory_bytes;
  options.fault_at_slice = faults.kernel_trap;
  Backends backends;
  for (int index : indices) {
    auto backend = MakeCudaBackend(index, options);
    if (!backend.ok()) return backend.status();
    backends.push_back(*std::move(backend));
  }
  return backends;
#else
  (void)flags, (void)faults;
  return absl::NotFoundError("built without nvcc, so without CUDA");
#endif
}

absl::StatusOr<Backends> MakeBackends(const Config& config) {
  std::string why;
  if (config.backend != "cpu") {
    absl::StatusOr<Backends> cuda = MakeCudaBackends(config.cuda, config.faults);
    if (cuda.ok()) return cuda;
    // A device that is there and does not work is for its owner to see, not to be worked around.
    if (config.backend == "cuda" || !absl::IsNotFound(cuda.status())) {
      return absl::Status(cuda.status().code(),
                          absl::StrCat("--backend=", config.backend, ": ", cuda.status().message()));
    }
    why = std::string(cuda.status().message());
  }
  Backends backends;
  backends.push_back(MakeCpuBackend(config.cpu));
  if (!why.empty()) {
    Log(Severity::kInfo, "backend", {{"chosen", backends[0]->device().name}, {"why", absl::StrCat("auto; ", why)}});
  }
  return backends;
}

// The flags' options, with what depends on the device.
SchedulerOptions OptionsFor(const Backend& backend, const CpuBackendOptions& cpu, SchedulerOptions options) {
  const DeviceDescription device = backend.device();
  const bool gpu = device.backend == "cuda";
  if (options.max_working_bytes == 0) {
    options.max_working_bytes = gpu ? device.memory_bytes / 4 * 3 : int64_t{4} << 30;
  }
  // A GPU does more side by side the more it has; as the cost model learns how little that costs, more take part.
  options.turn_problems = gpu ? 16 : cpu.threads;
  options.turn_slices = gpu ? 2 : 1;
  // As long as decoding a message of 100 KB takes: the calls of the same loop wait no longer than for that.
  if (!gpu) options.lend = absl::Microseconds(100);
  return options;
}

// ---- gRPC -----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(const TlsFiles& tls) {
  if (tls.certificate.empty()) return grpc::InsecureServerCredentials();
  for (const std::string& file : {tls.certificate, tls.key, tls.client_ca}) {
    if (!file.empty() && access(file.c_str(), R_OK) != 0) {
      return absl::InvalidArgumentError(absl::StrCat("TLS file '", file, "' cannot be read"));
    }
  }
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(tls.key, tls.certificate, tls.client_ca,
                                                                           kCertificateRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  if (!tls.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

void AddChannelArguments(const Config& config, grpc::ServerBuilder* builder) {
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(duration), 0x7fffffff));
  };
  builder->SetMaxReceiveMessageSize(static_cast<int>(config.service.max_receive_message_bytes));
  builder->SetMaxSendMessageSize(-1);  // Replies are bounded where they are planned.
  // Messages on their way in are not counted by the service yet.
  grpc::ResourceQuota quota("receive");
  quota.Resize(static_cast<size_t>(config.scheduler.max_queue_bytes));
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // A port in use is an error.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, config.keepalive_time_ms);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, milliseconds(config.max_connection_age));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, milliseconds(config.max_connection_age_grace));
}

// Takes out the plugin that is there as soon as the library is linked.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; }),
                   plugins->end());
  }
};

// ---- The running server ---------------------------------------------------------------------------------------------

class Process {
 public:
  explicit Process(const Config& config) : config_(config) {}
  // Returns the exit code, or exits with it.
  int Run();

 private:
  absl::Status Start();
  absl::Status StartDevices();
  absl::Status StartGrpc();
  absl::Status StartMetrics();
  absl::Status WritePortFile() const;
  [[noreturn]] void Drain();
  [[noreturn]] void Leave(absl::Duration timeout, int exit_code);

  const Config& config_;
  // In the order of dependence: later ones use earlier ones.
  Metrics metrics_;
  Backends backends_;
  std::vector<std::unique_ptr<Scheduler>> schedulers_;  // One for each backend.
  std::unique_ptr<Executors> executors_;
  HealthService health_;
  std::unique_ptr<SinkhornServer> service_;
  std::unique_ptr<WebServer> web_;
  bool listening_ = false;
  int port_ = 0, metrics_port_ = 0;
};

absl::Status Process::StartGrpc() {
  auto credentials = MakeCredentials(config_.tls);
  if (!credentials.ok()) return credentials.status();
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();  // The library has done so already if it is linked.
  grpc::ServerBuilder builder;
  if (!config_.reflection) builder.SetOption(std::make_unique<WithoutReflection>());
  builder.AddListeningPort(config_.listen, *credentials, &port_);
  builder.RegisterService(&health_);
  AddChannelArguments(config_, &builder);
  listening_ = service_->Start(&builder, &health_);
  if (!listening_ || port_ == 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", config_.listen));
  return absl::OkStatus();
}

absl::Status Process::StartMetrics() {
  if (config_.metrics_listen.empty()) return absl::OkStatus();
  auto web = WebServer::Start(config_.metrics_listen, &metrics_,
                              [this] { return service_->state() == ServiceState::kReady && !service_->device_lost(); });
  if (!web.ok()) return web.status();
  web_ = *std::move(web);
  metrics_port_ = web_->port();
  return absl::OkStatus();
}

// Makes a backend and a scheduler for each device.
absl::Status Process::StartDevices() {
  auto backends = MakeBackends(config_);
  if (!backends.ok()) return backends.status();
  backends_ = *std::move(backends);
  std::vector<Executor> executors;
  for (std::unique_ptr<Backend>& backend : backends_) {
    if (config_.faults.any()) backend = MakeFaultyBackend(config_.faults, std::move(backend));
    schedulers_.push_back(std::make_unique<Scheduler>(backend.get(), RealClock(),
                                                      OptionsFor(*backend, config_.cpu, config_.scheduler),
                                                      RoundCounter(*backend, &metrics_)));
    executors.emplace_back(backend.get(), schedulers_.back().get());
  }
  executors_ = std::make_unique<Executors>(std::move(executors));
  return absl::OkStatus();
}

absl::Status Process::Start() {
  if (absl::Status status = StartDevices(); !status.ok()) return status;
  ServiceOptions options = config_.service;
  if (!config_.auth_token_file.empty()) {
    auto tokens = Tokens::Load(config_.auth_token_file);
    if (!tokens.ok()) return tokens.status();
    options.tokens = *std::move(tokens);
  }
  if (!config_.tenant_file.empty()) {
    auto tenants = Tenants::Load(config_.tenant_file);
    if (!tenants.ok()) return tenants.status();
    options.tenants = *std::move(tenants);
  }
  if (config_.report_load) options.load_report = MakeLoadReport(executors_.get(), &metrics_);
  options.on_device_lost = [] { kill(getpid(), kDeviceLostSignal); };
  service_ = std::make_unique<SinkhornServer>(executors_.get(), &metrics_, options);
  AddServerGauges(service_.get(), executors_.get(), {options.version, options.commit, SINKHORN_HAVE_CUDA != 0},
                  &metrics_);
  for (auto& scheduler : schedulers_) scheduler->Start();
  if (absl::Status status = StartGrpc(); !status.ok()) return status;
  if (absl::Status status = StartMetrics(); !status.ok()) return status;
  Log(Severity::kInfo, "listening",
      {{"address", config_.listen}, {"port", absl::StrCat(port_)}, {"metrics_port", absl::StrCat(metrics_port_)}});

  for (const Executor& executor : executors_->all()) {
    if (absl::Status status = CheckGoldenProblems(executor.scheduler, kGoldenTimeout); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(executor.device.name, ": ", status.message()));
    }
  }
  service_->SetState(ServiceState::kReady);
  health_.SetReady(true);
  for (const Executor& executor : executors_->all()) {
    Log(Severity::kInfo, "ready", {{"device", executor.device.name}, {"version", options.version}});
  }
  return WritePortFile();
}

// Appears at once and whole, so that whoever waits for it never reads half of it.
absl::Status Process::WritePortFile() const {
  if (config_.port_file.empty()) return absl::OkStatus();
  const std::string draft = config_.port_file + ".tmp";
  std::ofstream(draft) << port_ << "\n" << metrics_port_ << "\n";
  if (std::rename(draft.c_str(), config_.port_file.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", config_.port_file));
}

void Process::Drain() {
  service_->SetState(ServiceState::kDraining);
  health_.SetReady(false);  // Whoever has seen this finds the state changed.
  Log(Severity::kInfo, "draining",
      {{"grace", absl::FormatDuration(config_.drain_grace)},
       {"in_flight", absl::StrCat(service_->requests_in_flight())}});
  absl::SleepFor(config_.drain_grace);
  Leave(config_.drain_timeout, 0);
}

// Refuses new requests, gives accepted ones `timeout` to finish and their replies kFlushTimeout to be sent, ends the
// rest with UNAVAILABLE, and exits.
//
// The kernel then closes the connections, which clients read as UNAVAILABLE and try elsewhere. gRPC's own shutdown
// would answer calls that arrive while it lasts with CANCELLED, which nobody tries again; and clients that have no
// reason to stop calling never leave it a moment without any.
void Process::Leave(absl::Duration timeout, int exit_code) {
  service_->SetState(ServiceState::kStopping);
  const bool idle = service_->AwaitIdle(absl::Now() + timeout);
  const int64_t left = service_->requests_in_flight();
  for (auto& scheduler : schedulers_) scheduler->Stop();
  if (timeout > absl::ZeroDuration()) service_->AwaitSilence(kSilence, absl::Now() + kSilenceTimeout);
  health_.Shutdown();
  service_->AwaitSent(absl::Now() + kFlushTimeout);
  Log(idle ? Severity::kInfo : Severity::kWarning, "stopped", {{"abandoned", absl::StrCat(idle ? 0 : left)}});
  _exit(exit_code);
}

int Process::Run() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, kDeviceLostSignal}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // Inherited by every thread: only sigwait sees them.
  signal(SIGPIPE, SIG_IGN);

  const absl::Status status = Start();
  if (!status.ok()) {
    Log(Severity::kError, "start_failed", {{"why", std::string(status.message())}});
    if (listening_) Leave(absl::ZeroDuration(), 1);
    return 1;
  }
  int received = 0;
  sigwait(&signals, &received);
  if (received == kDeviceLostSignal) {
    Log(Severity::kError, "device_lost", {});
    health_.SetReady(false);
    Leave(kFlushTimeout, 1);
  }
  std::thread([signals] {
    int second = 0;
    sigwait(&signals, &second);
    Log(Severity::kWarning, "second_signal", {});
    _exit(kExitSecondSignal);
  }).detach();
  Drain();
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) {
  // Each RPC thread then waits for its own connections alone. gRPC's default on Linux has one thread at a time wait for
  // all, which hands every event on: 53,000 requests/s on 16 cores, 97,000 so. No gain on two. (Thousands of
  // connections are for epoll1.)
  if (sinkhorn::AvailableCores() >= 8) setenv("GRPC_POLL_STRATEGY", "poll", /*overwrite=*/0);
  // The packaged abseil is built with its debug default on: each lock taken would search a graph of all locks held.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  const absl::StatusOr<sinkhorn::Config> config = sinkhorn::ParseConfig(argc, argv);
  if (!config.ok()) {
    std::fprintf(stderr, "sinkhorn_server: %s\n", std::string(config.status().message()).c_str());
    return sinkhorn::kExitUsage;
  }
  sinkhorn::ForwardGrpcLog();
  return sinkhorn::Process(*config).Run();
}
