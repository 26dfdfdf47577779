// Timed solves for a driver in another process: requests on standard input, replies on standard
// output, both as the structs below; tensors in one file that both have open.
//
//   sinkhorn_bench_solver FILE [THREADS]
//
// The driver writes the inputs into FILE and gives each tensor's offset + 1 in place of its
// pointer. They are copied to ordinary memory before the clock starts, and outputs back after it
// has stopped.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/problem.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/solver.h"

namespace sinkhorn::bench {
namespace {

enum class Operation : int32_t { kSolve, kFmaRate, kExpRate, kReadRate, kDevice };

struct Request {
  Operation operation;
  int32_t warmups, repeats, padding;
  int64_t bytes;  // Of the file's part in use; kReadRate: of the working set.
  TimedProblem problem;
};

struct Reply {  // Followed by `repeats` doubles: seconds.
  int32_t ok, repeats;
  double rate;
  TimedReport report;
  char text[256];  // Error, or the device's name.
};

// The same problem with offsets turned into pointers to `memory`.
TimedProblem Located(TimedProblem problem, char* memory) {
  const auto locate = [&](auto** pointer) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(*pointer);
    if (offset != 0) *pointer = memory + (offset - 1);
  };
  for (const void** in : {&problem.logits, &problem.cotangent, &problem.cost, &problem.x, &problem.y}) locate(in);
  for (void** out : {&problem.f, &problem.g, &problem.plan, &problem.gradient_logits}) locate(out);
  return problem;
}

absl::Status Transfer(const char* path, const char* mode, char* memory, size_t bytes) {
  std::FILE* const file = std::fopen(path, mode);
  if (file == nullptr) return absl::NotFoundError(path);
  const size_t done =
      *mode == 'w' || std::strchr(mode, '+') ? std::fwrite(memory, 1, bytes, file) : std::fread(memory, 1, bytes, file);
  if (std::fclose(file) != 0 || done != bytes) return absl::DataLossError(path);
  return absl::OkStatus();
}

class Session {
 public:
  Session(const char* path, int threads) : path_(path), threads_(threads) {
    CpuBackendOptions options;
    options.threads = threads;
    backend_ = MakeCpuBackend(options);
  }

  void Answer(const Request& request, Reply* reply, std::vector<double>* seconds) {
    reply->ok = 1;
    switch (request.operation) {
      case Operation::kFmaRate:
        reply->rate = FmaRate(threads_);
        return;
      case Operation::kExpRate:
        reply->rate = ExpRate(threads_);
        return;
      case Operation::kReadRate:
        reply->rate = ReadRate(threads_, request.bytes);
        return;
      case Operation::kDevice:
        std::snprintf(reply->text, sizeof reply->text, "%s", backend_->device().name.c_str());
        return;
      case Operation::kSolve:
        break;
    }
    seconds->resize(request.repeats);
    const absl::Status status = SolveInMemory(request, seconds->data(), &reply->report);
    reply->ok = status.ok();
    std::snprintf(reply->text, sizeof reply->text, "%s", std::string(status.message()).c_str());
  }

 private:
  absl::Status SolveInMemory(const Request& request, double* seconds, TimedReport* report) {
    // Grows only: a problem's outputs have been written before the clock starts.
    if (request.bytes > static_cast<int64_t>(memory_.size())) memory_.resize(request.bytes);
    if (absl::Status s = Transfer(path_, "rb", memory_.data(), request.bytes); !s.ok()) return s;
    const TimedProblem problem = Located(request.problem, memory_.data());
    if (absl::Status s = SolveTimed(backend_.get(), problem, request.warmups, request.repeats, seconds, report);
        !s.ok()) {
      return s;
    }
    return Transfer(path_, "r+b", memory_.data(), request.bytes);
  }

  const char* const path_;
  const int threads_;
  std::unique_ptr<Backend> backend_;
  std::vector<char> memory_;
};

int Serve(const char* path, int threads) {
  Session session(path, threads);
  Request request;
  while (std::fread(&request, sizeof request, 1, stdin) == 1) {
    Reply reply = {};
    std::vector<double> seconds;
    session.Answer(request, &reply, &seconds);
    reply.repeats = static_cast<int32_t>(seconds.size());
    std::fwrite(&reply, sizeof reply, 1, stdout);
    std::fwrite(seconds.data(), sizeof(double), seconds.size(), stdout);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace sinkhorn::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: sinkhorn_bench_solver FILE [THREADS]\n");
    return 2;
  }
  return sinkhorn::bench::Serve(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
}
