// Workers own all they touch: a completion queue, connections, histograms. Closed loop: one thread per worker starts
// and ends its calls. Open loop: a second thread per worker, the pacer, starts them on time.
#include "client/loadgen/load.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/loadgen/reply.h"
#include "client/loadgen/request.h"
#include "client/loadgen/stream.h"
#include "client/loadgen/verify.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/generic/generic_stub.h"

namespace sinkhorn::client {
namespace {

constexpr char kSolveMethod[] = "/sinkhorn.v1.SinkhornService/Solve";
constexpr size_t kWrongMax = 20;

void SleepUntil(int64_t time) {
  const timespec until = {time / 1'000'000'000, time % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * t.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// ---- Requests, encoded once ----

struct Payload {
  grpc::Slice bytes;
  v1::SolveRequest request;              // Only with verify.
  std::atomic<uint64_t> fingerprint{0};  // Of its first answer; 0: none yet.
};

using Payloads = std::vector<std::vector<std::unique_ptr<Payload>>>;  // [entry][payload]

Payloads MakePayloads(const LoadOptions& options) {
  Payloads payloads(options.mix.size());
  for (size_t i = 0; i < options.mix.size(); ++i) {
    for (int j = 0; j < options.payloads; ++j) {
      auto payload = std::make_unique<Payload>();
      v1::SolveRequest request =
          MakeRequest(options.mix[i], options.seed * 1'000'003 + i * 1'009 + static_cast<uint64_t>(j), options.verify);
      payload->bytes = grpc::Slice(request.SerializeAsString());
      if (options.verify) payload->request = std::move(request);
      payloads[i].push_back(std::move(payload));
    }
  }
  return payloads;
}

// ---- What all workers share ----

struct Shared {
  const LoadOptions& options;
  const Payloads& payloads;
  int64_t start = 0, measure_start = 0, stop = 0;  // LoadClock()s
  std::chrono::system_clock::time_point drain_deadline{};
  std::atomic<int64_t> tickets{0};    // Measured requests begun.
  std::atomic<int64_t> in_flight{0};  // Open loop.
};

// Of a call or stream.
std::string Authorization(const LoadOptions& options) {
  const std::string& token = options.connection.auth_token;
  return token.empty() ? "" : absl::StrCat("Bearer ", token);
}

class Worker final : public LoadReceiver {
 public:
  Worker(Shared* shared, std::vector<std::shared_ptr<grpc::Channel>> channels, int clients, double rate, uint64_t seed)
      : shared_(*shared), clients_(clients), rate_(rate), random_(seed) {
    for (auto& channel : channels) stubs_.push_back(std::make_unique<grpc::GenericStub>(std::move(channel)));
    for (const MixEntry& entry : shared_.options.mix) weights_.push_back(entry.weight);
    result_.entries.resize(weights_.size());
  }

  void Run() {
    if (shared_.options.stream) {
      const LoadStreamOptions options{shared_.drain_deadline, Authorization(shared_.options), part_};
      for (const auto& stub : stubs_) {
        streams_.push_back(std::make_unique<LoadStream>(stub.get(), &queue_, options, this));
      }
      open_streams_ = static_cast<int64_t>(streams_.size());
    }
    if (rate_ > 0) {
      std::thread pacer([this] {
        Pace();
        Release();
      });
      Collect();
      pacer.join();
    } else {
      for (int i = 0; i < clients_; ++i) Start(LoadClock());
      Release();
      Collect();
    }
  }

  LoadResult& result() { return result_; }
  int64_t last_end() const { return last_end_; }

 private:
  // Open loop: starts calls at exponentially distributed intervals; the sum of all workers' is Poisson at the full
  // rate.
  void Pace() {
    prctl(PR_SET_TIMERSLACK, 1);                                  // ns; Linux's 50 us would be part of every latency.
    std::exponential_distribution<double> interval(rate_ / 1e9);  // In ns.
    double next = static_cast<double>(shared_.start);
    while (true) {
      next += interval(random_);
      const int64_t begin = static_cast<int64_t>(next);
      if (begin >= shared_.stop) break;
      if (begin > LoadClock()) SleepUntil(begin);
      if (shared_.in_flight >= shared_.options.max_in_flight) {
        result_.not_sent += begin >= shared_.measure_start;
        continue;
      }
      if (begin >= shared_.measure_start) result_.start_delay.Record(LoadClock() - begin);
      if (!Start(begin)) break;
    }
  }

  // Starts a request. False: the load has ended.
  bool Start(int64_t begin) {
    const LoadOptions& options = shared_.options;
    if (begin >= shared_.stop) return false;
    const bool measured = begin >= shared_.measure_start;
    if (measured && options.requests > 0 && shared_.tickets++ >= options.requests) return false;
    LoadRequest request;
    request.begin = begin;
    request.measured = measured;
    request.entry = std::discrete_distribution<size_t>(weights_.begin(), weights_.end())(random_);
    request.payload = random_() % static_cast<uint64_t>(options.payloads);
    const grpc::Slice& bytes = shared_.payloads[request.entry][request.payload]->bytes;
    ++holds_;
    ++shared_.in_flight;
    const size_t connection = next_connection_++ % stubs_.size();
    if (options.stream) {
      streams_[connection]->Send(bytes, request);
    } else {
      new Call(this, stubs_[connection].get(), bytes, request);
    }
    return true;
  }

  // A request that is a call of its own, until it is answered.
  class Call final : private LoadEvent {
   public:
    Call(Worker* worker, grpc::GenericStub* stub, const grpc::Slice& bytes, const LoadRequest& request)
        : worker_(*worker), request_(request) {
      const LoadOptions& options = worker_.shared_.options;
      auto deadline = worker_.shared_.drain_deadline;
      if (options.deadline != absl::InfiniteDuration()) {
        deadline = std::min(deadline, absl::ToChronoTime(absl::Now() + options.deadline));
      }
      context_.set_deadline(deadline);
      const std::string authorization = Authorization(options);
      if (!authorization.empty()) context_.AddMetadata("authorization", authorization);
      reader_ = stub->PrepareUnaryCall(&context_, kSolveMethod, grpc::ByteBuffer(&bytes, 1), &worker_.queue_);
      reader_->StartCall();
      reader_->Finish(&reply_, &status_, static_cast<LoadEvent*>(this));
    }

   private:
    void Happen(bool) override {
      const std::unique_ptr<Call> self(this);
      const int64_t end = LoadClock();
      v1::SolveResponse response;
      absl::Status status = FromGrpcStatus(status_);
      if (status.ok() && !reply_.Valid()) status = MissingAnswer(absl::FromChrono(context_.deadline()));
      if (status.ok()) status = ReadReply(&reply_, worker_.part_, &response);
      worker_.Answered(request_, end, status, response);
    }

    Worker& worker_;
    const LoadRequest request_;
    grpc::ClientContext context_;
    grpc::ByteBuffer reply_;
    grpc::Status status_;
    std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader_;
  };

  // Whoever may still start requests, and each request under way, holds the queue open, or the streams, which do.
  void Release() {
    if (--holds_ > 0) return;
    if (streams_.empty()) queue_.Shutdown();
    for (const auto& stream : streams_) stream->Close();
  }

  void Closed() override {
    if (--open_streams_ == 0) queue_.Shutdown();
  }

  void Collect() {
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) static_cast<LoadEvent*>(tag)->Happen(ok);
  }

  void Answered(const LoadRequest& request, int64_t end, const absl::Status& status,
                const v1::SolveResponse& response) override {
    --shared_.in_flight;
    ++result_.call_count;
    if (rate_ == 0) Start(end);
    Record(request, end, status, response);
    Release();
  }

  void Record(const LoadRequest& request, int64_t end, const absl::Status& status, const v1::SolveResponse& response) {
    LoadStats& stats = result_.entries[request.entry];
    if (status.ok() && shared_.options.verify) Verify(request, response);
    if (!request.measured) return;
    last_end_ = std::max(last_end_, end);
    if (!status.ok()) {
      const std::string reason = GetErrorDetails(status).reason;
      const std::string code = absl::StatusCodeToString(status.code());
      ++stats.errors[reason.empty() ? code : absl::StrCat(code, "/", reason)];
      return;
    }
    const auto nanoseconds = [](double seconds) { return static_cast<int64_t>(1e9 * seconds); };
    const v1::Execution& execution = response.execution();
    const int64_t queue = nanoseconds(execution.queue_seconds());
    const int64_t transfer = nanoseconds(execution.transfer_seconds());
    const int64_t compute = nanoseconds(execution.compute_seconds());
    stats.latency.Record(end - request.begin);
    stats.queue.Record(queue);
    stats.transfer.Record(transfer);
    stats.compute.Record(compute);
    stats.outside.Record(end - request.begin - queue - transfer - compute);
    stats.batch.Record(execution.batch_problem_count());
    stats.problems += shared_.options.mix[request.entry].problem_count();
    stats.iteration_limit += response.convergence().stop_reason() == v1::STOP_REASON_MAX_ITERATIONS;
    stats.iterations += response.convergence().iterations();
  }

  // Warm-up answers are checked too.
  void Verify(const LoadRequest& sent, const v1::SolveResponse& response) {
    const MixEntry& entry = shared_.options.mix[sent.entry];
    Payload& payload = *shared_.payloads[sent.entry][sent.payload];
    std::string wrong = VerifyAnswer(entry, payload.request, response);
    const uint64_t fingerprint = std::max<uint64_t>(1, Fingerprint(response));
    uint64_t first = 0;
    if (!payload.fingerprint.compare_exchange_strong(first, fingerprint) && first != fingerprint && wrong.empty()) {
      wrong = "its bits differ from an earlier answer to the same request";
    }
    if (wrong.empty()) return;
    ++result_.wrong_count;
    if (result_.wrong.size() < kWrongMax) {
      result_.wrong.push_back(absl::StrCat(entry.name, " input ", sent.payload, ": ", wrong));
    }
  }

  Shared& shared_;
  const int clients_;
  const double rate_;
  std::mt19937_64 random_;  // Of the one thread that starts calls.
  const ReplyPart part_ = shared_.options.verify ? ReplyPart::kAll : ReplyPart::kSummary;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  size_t next_connection_ = 0;
  std::vector<double> weights_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<LoadStream>> streams_;  // One for each stub, or none.
  std::atomic<int64_t> open_streams_{0};
  std::atomic<int64_t> holds_{1};
  int64_t last_end_ = 0;
  LoadResult result_;  // `not_sent` and `start_delay` are the pacer's, the rest the collector's.
};

// The channels of one worker, connected to a server that is ready.
absl::StatusOr<std::vector<std::shared_ptr<grpc::Channel>>> Connect(const LoadOptions& options, int count) {
  ClientOptions connection = options.connection;
  connection.private_connections = true;
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = CreateChannel(options.target, connection);
    if (!channel.ok()) return channel.status();
    const absl::Status ready = Client(*channel, connection).WaitForReady(absl::Now() + options.connect_timeout);
    if (!ready.ok()) return ready;
    channels.push_back(*std::move(channel));
  }
  return channels;
}

// Part `i` of `total`, split as evenly as whole numbers can be.
int Share(int total, int parts, int i) { return total / parts + (i < total % parts); }

}  // namespace

int64_t LoadClock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void LoadStats::Merge(const LoadStats& other) {
  latency.Merge(other.latency);
  queue.Merge(other.queue);
  transfer.Merge(other.transfer);
  compute.Merge(other.compute);
  outside.Merge(other.outside);
  batch.Merge(other.batch);
  problems += other.problems;
  iteration_limit += other.iteration_limit;
  iterations += other.iterations;
  for (const auto& [name, count] : other.errors) errors[name] += count;
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  const int threads = options.rate > 0 ? options.threads : std::min(options.threads, options.clients);
  const Payloads payloads = MakePayloads(options);
  Shared shared{options, payloads};
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < threads; ++i) {
    auto channels = Connect(options, std::max(1, Share(options.connections, threads, i)));
    if (!channels.ok()) return channels.status();
    workers.push_back(std::make_unique<Worker>(&shared, *std::move(channels), Share(options.clients, threads, i),
                                               options.rate / threads, options.seed * 7919 + static_cast<uint64_t>(i)));
  }

  const double cpu_start = CpuSeconds();
  shared.start = LoadClock();
  shared.measure_start = shared.start + absl::ToInt64Nanoseconds(options.warmup);
  shared.stop = shared.measure_start + absl::ToInt64Nanoseconds(options.duration);
  shared.drain_deadline = absl::ToChronoTime(absl::Now() + options.warmup + options.duration + options.drain);
  std::vector<std::thread> running;
  for (const auto& worker : workers) running.emplace_back([&worker] { worker->Run(); });
  for (std::thread& thread : running) thread.join();

  LoadResult result;
  result.cpu_seconds = CpuSeconds() - cpu_start;
  result.entries.resize(options.mix.size());
  int64_t last_end = shared.measure_start;
  for (const auto& worker : workers) {
    const LoadResult& part = worker->result();
    for (size_t i = 0; i < result.entries.size(); ++i) result.entries[i].Merge(part.entries[i]);
    result.not_sent += part.not_sent;
    result.start_delay.Merge(part.start_delay);
    result.call_count += part.call_count;
    result.wrong_count += part.wrong_count;
    result.wrong.insert(result.wrong.end(), part.wrong.begin(), part.wrong.end());
    last_end = std::max(last_end, worker->last_end());
  }
  for (const LoadStats& entry : result.entries) result.all.Merge(entry);
  if (result.wrong.size() > kWrongMax) result.wrong.resize(kWrongMax);
  result.seconds = 1e-9 * static_cast<double>(last_end - shared.measure_start);
  return result;
}

}  // namespace sinkhorn::client
