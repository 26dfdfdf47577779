// The CPU backend: residents are Works (work.h); Advance repeats rounds, each one parallel loop over chunks of all
// their current phases. Where each has one chunk, each thread goes on with the one it took: there is nothing to wait
// for. Threads come from Eigen's work-stealing pool; the calling lane works too.
#include "kernels/cpu/cpu_backend.h"

#include <sched.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/highway.h"
#include "kernels/cpu/anytime_work.h"
#include "kernels/cpu/memory_pool.h"
#include "kernels/cpu/work.h"
#include "unsupported/Eigen/CXX11/ThreadPool"

namespace sinkhorn {
namespace cpu {

Scratch::~Scratch() { FreeBlock(data_, bytes_); }

void* Scratch::Get(size_t bytes) {
  if (bytes > bytes_) {
    FreeBlock(data_, bytes_);
    bytes_ = bytes;
    data_ = AllocateBlock(bytes_);
    if (data_ == nullptr) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
  }
  return data_;
}

namespace {

using SteadyClock = std::chrono::steady_clock;

// Denormals cost a hundred cycles each and mean zero here: flushed while a chunk runs.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

class CpuSolve final : public Solve {
 public:
  explicit CpuSolve(std::unique_ptr<Work> work) : work_(std::move(work)) { Refresh(); }
  bool done() const override { return done_; }
  absl::Status status() const override { return failure_.ok() ? work_->status() : failure_; }
  SolveReport report() const override { return work_->report(); }
  Convergence progress() const override { return work_->progress(); }
  void FinishSoon() override {
    if (auto* anytime = dynamic_cast<AnytimeWork*>(work_.get())) anytime->FinishSoon();
  }

  Work* work() { return work_.get(); }
  void SetAlone(bool alone) {
    if (next_ > 0) return;  // Within a phase.
    work_->SetAlone(alone);
    Refresh();
  }
  int64_t remaining() const { return chunks_ - next_; }
  bool serial() const { return chunks_ == 1; }
  int64_t Take(int64_t count) {  // Returns the first of `count` chunks.
    next_ += count;
    return next_ - count;
  }
  void RunChunk(int64_t chunk, Scratch* scratch) {
    try {
      work_->RunChunk(chunk, scratch);
    } catch (const std::bad_alloc&) {
      out_of_memory_.store(true, std::memory_order_relaxed);
    }
  }
  // Its one chunk was taken: runs it and the phases that follow, as long as they have one and `go_on` says so.
  template <class GoOn>
  void RunSerial(Scratch* scratch, GoOn go_on) {
    for (;;) {
      {
        FlushDenormals flush;
        RunChunk(0, scratch);
      }
      EndRound();
      if (done_ || !serial() || !go_on()) return;
      Take(1);
    }
  }
  // After a round: if the phase is complete, goes to the next.
  void EndRound() {
    if (done_) return;
    try {
      if (!out_of_memory_.load(std::memory_order_relaxed)) {
        if (next_ < chunks_) return;
        work_->EndPhase();
        Refresh();
        return;
      }
    } catch (const std::bad_alloc&) {
    }
    failure_ = absl::ResourceExhaustedError("out of memory while solving this problem");
    done_ = true;
  }

 private:
  void Refresh() {
    next_ = 0;
    chunks_ = work_->chunk_count();
    done_ = chunks_ == 0;
  }
  std::unique_ptr<Work> work_;
  int64_t next_ = 0, chunks_ = 0;
  bool done_ = false;
  std::atomic<bool> out_of_memory_{false};
  absl::Status failure_;
};

// A run of chunks of one solve, within a round.
struct Run {
  CpuSolve* solve;
  int64_t first, count;
  int64_t begin;  // Its first chunk's position in the round.
};

// One parallel loop over the chunks of all residents. Each thread first takes its own share in order, then what is left
// of the others'. From round to round the same thread meets the same data in its cache, and every other round goes
// backwards: data somewhat larger than the cache is then met where the last round left it, not evicted from end to end.
class Round {
 public:
  explicit Round(int threads) : shares_(threads) {}

  // Alone, with no thread inside. `share_seconds`: what each solve may have of the round.
  void Clear(double share_seconds) {
    runs_.clear();
    total_ = 0;
    serial_ = true;
    share_ = std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(share_seconds));
  }
  void Add(CpuSolve* solve, int64_t first, int64_t count) {
    runs_.push_back({solve, first, count, total_});
    total_ += count;
    serial_ &= solve->serial();
  }
  // One phase of each, whatever they are.
  void TakeTurns() { serial_ = false; }
  void Open() {
    backwards_ = !backwards_;
    const int64_t threads = shares_.size();
    for (int64_t t = 0; t < threads; ++t) {
      shares_[t].begin = (t * total_ + threads - 1) / threads;
      shares_[t].next.store(shares_[t].begin, std::memory_order_relaxed);
      shares_[t].end = ((t + 1) * total_ + threads - 1) / threads;
    }
    finished_.store(0, std::memory_order_relaxed);
    left_over_.store(false, std::memory_order_relaxed);
  }

  void Work(int thread, Scratch* scratch) {
    if (serial_ && total_ > 1) return WorkSerially(thread, scratch);
    FlushDenormals flush;
    const int threads = static_cast<int>(shares_.size());
    int64_t done = 0;
    for (int t = 0; t < threads; ++t) {
      Share& share = shares_[(thread + t) % threads];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end; ++done) {
        if (backwards_) i = share.begin + share.end - 1 - i;
        const auto run = std::upper_bound(runs_.begin(), runs_.end(), i,
                                          [](int64_t chunk, const Run& r) { return chunk < r.begin; }) -
                         1;
        run->solve->RunChunk(run->first + i - run->begin, scratch);
      }
    }
    finished_.fetch_add(done, std::memory_order_release);
  }
  // All have one chunk: whoever takes one keeps it for its share of the round. The first thread that had some and finds
  // no more ends the round, so that what is left is laid out anew.
  void WorkSerially(int thread, Scratch* scratch) {
    const int threads = static_cast<int>(shares_.size());
    int64_t done = 0;
    for (int t = 0; t < threads; ++t) {
      Share& share = shares_[(thread + t) % threads];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end; ++done) {
        SteadyClock::time_point end{};
        runs_[i].solve->RunSerial(scratch, [&] {
          const auto now = SteadyClock::now();
          if (end == SteadyClock::time_point{}) end = now + share_;  // Most are over before this is asked.
          return now < end && !left_over_.load(std::memory_order_relaxed);
        });
      }
    }
    if (done > 0) left_over_.store(true, std::memory_order_relaxed);
    finished_.fetch_add(done, std::memory_order_release);
  }
  bool complete() const { return finished_.load(std::memory_order_acquire) == total_; }
  int64_t total() const { return total_; }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t begin = 0, end = 0;
  };
  std::vector<Run> runs_;
  int64_t total_ = 0;
  bool serial_ = false;  // All solves are.
  SteadyClock::duration share_{};
  bool backwards_ = true;
  std::vector<Share> shares_;
  alignas(64) std::atomic<int64_t> finished_{0};  // Chunks.
  std::atomic<bool> left_over_{false};            // A thread has nothing to do.
};

// Waits a moment; lets others run if it takes long.
void Pause(int spins) {
#if defined(__x86_64__)
  if (spins < 2000) return _mm_pause();
#endif
  (void)spins;
  sched_yield();
}

// The helpers of one Advance: pool threads that go from round to round without sleeping in between. One that comes
// late, when the Advance is over, finds the door closed.
class Team {
 public:
  explicit Team(int threads) : round_(threads) {}

  Round* round() { return &round_; }
  // Lane: runs the round with whoever is here.
  void Run(Scratch* scratch) {
    round_.Open();
    if (round_.total() == 1) return round_.Work(0, scratch);
    open_.store(++generation_);
    round_.Work(0, scratch);
    for (int spins = 0; !round_.complete(); ++spins) Pause(spins);
    open_.store(0);
    for (int spins = 0; inside_.load() > 0; ++spins) Pause(spins);
  }
  void Dismiss() { dismissed_.store(true); }
  // Helper: serves until dismissed.
  void Serve(int thread, Scratch* scratch) {
    int64_t served = 0;
    for (int spins = 0; !dismissed_.load(std::memory_order_relaxed); ++spins) {
      if (open_.load(std::memory_order_relaxed) <= served) {
        Pause(spins);
        continue;
      }
      inside_.fetch_add(1);
      const int64_t open = open_.load();
      if (open > served) {
        round_.Work(thread, scratch);
        served = open;
        spins = 0;
      }
      inside_.fetch_sub(1);
    }
  }

 private:
  Round round_;
  int64_t generation_ = 0;
  // What a thread waits for has a cache line of its own.
  alignas(64) std::atomic<int64_t> open_{0};  // Generation of the round that may be entered; 0: none.
  std::atomic<bool> dismissed_{false};
  alignas(64) std::atomic<int> inside_{0};
};

int AvailableCores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options)
      : options_(options),
        threads_(options.threads > 0 ? options.threads : AvailableCores()),
        scratch_(threads_),
        pool_(std::max(1, threads_ - 1)) {
    const int64_t targets = hwy::SupportedTargets();  // The lowest bit is the best.
    device_.name = absl::StrCat("cpu: ", hwy::TargetName(targets & -targets), ", ", threads_,
                                threads_ == 1 ? " thread" : " threads");
    device_.backend = "cpu";
    device_.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  }

  DeviceDescription device() const override { return device_; }
  int lanes() const override { return 1; }
  bool can_finish_soon() const override { return true; }
  std::vector<MemoryUse> memory() const override { return {{"kept", static_cast<int64_t>(KeptBytes())}}; }

  int64_t WorkingBytes(const Problem& problem) const override {
    return problem.kind == ProblemKind::kNormalization ? NormalizationBytes(problem)
                                                       : TransportBytes(problem, options_.kernel_cache_bytes);
  }
  double PredictedSeconds(const Problem& problem) const override {
    return (problem.kind == ProblemKind::kNormalization ? NormalizationSeconds(problem) : TransportSeconds(problem)) /
           threads_;
  }

  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) override {
    try {
      return std::unique_ptr<Solve>(std::make_unique<CpuSolve>(
          problem.kind == ProblemKind::kNormalization ? MakeNormalizationWork(problem)
                                                      : MakeTransportWork(problem, options_.kernel_cache_bytes)));
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the problem needs ", WorkingBytes(problem), " bytes of working memory; not available"));
    }
  }

  absl::Status Advance(int lane, absl::Span<Solve* const> solves, double slice_seconds) override {
    (void)lane;
    std::vector<CpuSolve*> active;
    for (Solve* solve : solves) active.push_back(static_cast<CpuSolve*>(solve));
    const auto end = SteadyClock::now() + std::chrono::duration<double>(slice_seconds);
    const auto team = std::make_shared<Team>(threads_);
    bool called = false;
    double left = slice_seconds;
    do {
      for (CpuSolve* solve : active) solve->SetAlone(active.size() == 1 && threads_ > 1);
      const double predicted = Fill(team->round(), active, left * threads_);
      if (!called && threads_ > 1 && WorthHelp(*team->round(), active, predicted)) {
        called = true;
        for (int h = 1; h < threads_; ++h) {
          pool_.Schedule([this, team] {
            const int thread = 1 + pool_.CurrentThreadId();
            team->Serve(thread, &scratch_[thread]);
          });
        }
      }
      // Not before helpers come, or the lane would keep to one solve while the others wait.
      if (!called && threads_ > 1) team->round()->TakeTurns();
      team->Run(&scratch_[0]);
      for (CpuSolve* solve : active) solve->EndRound();
      active.erase(std::remove_if(active.begin(), active.end(), [](CpuSolve* s) { return s->done(); }), active.end());
      left = std::chrono::duration<double>(end - SteadyClock::now()).count();
    } while (!active.empty() && left > 0);
    team->Dismiss();
    return absl::OkStatus();
  }

 private:
  // Work shorter than this is not worth waking helpers.
  static constexpr double kSerialSeconds = 20e-6;

  static bool WorthHelp(const Round& round, const std::vector<CpuSolve*>& active, double predicted) {
    if (predicted > kSerialSeconds && round.total() > 1) return true;
    return std::any_of(active.begin(), active.end(), [](CpuSolve* s) { return s->work()->WillSplit(); });
  }

  // Lays out a round: a share of every solve. Returns its predicted seconds on one thread.
  double Fill(Round* round, const std::vector<CpuSolve*>& active, double thread_seconds) {
    const double share = thread_seconds / active.size();
    round->Clear(std::min(share, thread_seconds / threads_));
    double predicted = 0;
    for (CpuSolve* solve : active) {
      const double chunk_seconds = std::max(solve->work()->chunk_seconds(), 1e-9);
      const int64_t wanted = static_cast<int64_t>(std::min(share / chunk_seconds, 1e9));
      const int64_t count = std::min(solve->remaining(), std::max<int64_t>(wanted, threads_));
      round->Add(solve, solve->Take(count), count);
      predicted += count * chunk_seconds;
    }
    return predicted;
  }

  const CpuBackendOptions options_;
  const int threads_;
  DeviceDescription device_;
  std::vector<Scratch> scratch_;  // [0]: the lane; [1 + i]: pool thread i.
  Eigen::ThreadPool pool_;        // Last: its threads use what is above.
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<cpu::CpuBackend>(options);
}

}  // namespace sinkhorn
