#include "tests/fuzz/solve.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "absl/types/optional.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/answer_check.h"
#include "server/validate.h"
#include "server/wire.h"

namespace sinkhorn {
namespace {

// Small, so that an execution is short; a request beyond them is refused as one beyond the server's own is.
Limits SmallLimits() {
  Limits limits;
  limits.max_points = 64;
  limits.max_dimension = 16;
  limits.max_matrix_elements = 4096;
  limits.max_members = 16;
  limits.max_iterations = 50;
  limits.max_reply_bytes = 1 << 20;
  return limits;
}

constexpr double kSliceSeconds = 1e-3;
constexpr int kMaxSlices = 1000;

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

Backend& Cpu() {
  static Backend& backend = *[] {
    CpuBackendOptions options;
    options.threads = 1;
    return MakeCpuBackend(options).release();
  }();
  return backend;
}

// Whether a stretch of eight bytes still has the bits that the block was filled with: NaN in every format.
bool IsWritten(const ReplyTensor& tensor, const char* block) {
  const char* const end = block + tensor.offset + tensor.bytes;
  int filled = 0;
  for (const char* at = block + tensor.offset; at < end; ++at) {
    filled = *at == '\xff' ? filled + 1 : 0;
    if (filled == 8) return false;
  }
  return true;
}

void SolvePrepared(const Prepared& prepared, v1::SolveResponse* response, bool in_stream) {
  if (prepared.block != nullptr) std::memset(prepared.block.get(), 0xff, prepared.block_bytes);
  auto solve = Cpu().Admit(prepared.problem);
  Require(solve.ok(), "a small problem is admitted");
  Solve* const solves[] = {solve->get()};
  for (int slice = 0; !solves[0]->done(); ++slice) {
    Require(slice < kMaxSlices, "a small problem ends");
    Require(Cpu().Advance(0, solves, kSliceSeconds).ok(), "the CPU is not lost");
  }
  if (!solves[0]->status().ok()) {
    Require(solves[0]->status().code() == absl::StatusCode::kFailedPrecondition, "what fails has diverged");
    Require(!solves[0]->status().message().empty(), "and says what to change");
    return;
  }
  const SolveReport report = solves[0]->report();
  for (const ReplyTensor& tensor : prepared.tensors) {
    Require(IsWritten(tensor, prepared.block.get()), "every output is written");
  }
  if (!IsAnswer(report.convergence, *response, prepared)) return;  // The service says DIVERGED.
  const std::vector<WirePiece> pieces =
      EncodeResponse(*response, prepared.tensors, in_stream ? absl::optional<absl::string_view>("id") : absl::nullopt);
  std::string reply;
  for (const WirePiece& piece : pieces) {
    reply += piece.head;
    if (piece.tensor != nullptr) reply.append(prepared.block.get() + piece.tensor->offset, piece.tensor->bytes);
  }
  Require(in_stream ? v1::SolveStreamResponse().ParseFromString(reply) : v1::SolveResponse().ParseFromString(reply),
          "a reply can be read");
}

}  // namespace

void SolveBytes(absl::string_view bytes, bool in_stream) {
  v1::SolveStreamRequest outer;
  v1::SolveRequest inner;
  if (!DecodeWithoutTensors(bytes, in_stream ? static_cast<google::protobuf::Message*>(&outer) : &inner)) return;
  Prepared prepared;
  v1::SolveResponse response;
  const absl::optional<Error> error =
      Validate(bytes, in_stream ? outer.solve() : inner, SmallLimits(), &prepared, &response);
  if (!error.has_value()) return SolvePrepared(prepared, &response, in_stream);
  Require(error->reason != absl::string_view() && !error->message.empty(), "an error says what is wrong");
}

}  // namespace sinkhorn
