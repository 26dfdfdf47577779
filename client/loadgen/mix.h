// The problems of a load, as text and as requests.
//
//   --mix=normalization:32x4x4:20=0.9,point_cloud:256x256x64:10:gradient=0.1
//
//   entry  = KIND : SHAPE [: ITERATIONS] {: OPTION} [= WEIGHT]
//   kind   = normalization | dense | point_cloud
//   shape  = [BATCH x] N x M, point clouds [BATCH x] N x M x DIMENSION
//   option = epsilon=0.1  tolerance=1e-6  dtype=float16  recipe=exact  double  fast  symmetric  debias
//            gradient  plan  value  marginals
//
// Without ITERATIONS the server's default holds. With them, and no tolerance, exactly that many are done.
#ifndef SINKHORN_CLIENT_LOADGEN_MIX_H_
#define SINKHORN_CLIENT_LOADGEN_MIX_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

namespace v1 = ::sinkhorn::v1;

struct MixEntry {
  std::string name;  // Its text without the weight.
  double weight = 1;
  v1::SolveRequest::ProblemCase kind = v1::SolveRequest::PROBLEM_NOT_SET;
  int64_t batch = 0;  // 0: no batch dimension.
  int64_t n = 0, m = 0, dim = 0;
  bool gradient = false;
  v1::DataType dtype = v1::DATA_TYPE_FLOAT32;
  v1::SolveRequest blank;  // Everything but the arrays.

  int64_t problem_count() const { return batch == 0 ? 1 : batch; }
};

// INVALID_ARGUMENT names the entry and what is wrong with it.
absl::StatusOr<std::vector<MixEntry>> ParseMix(absl::string_view text);

// A request with random arrays that depend on `seed` alone: logits normal, points and costs uniform in [0, 1],
// cotangents normal. With `verify`, it also asks for what VerifyAnswer needs.
v1::SolveRequest MakeRequest(const MixEntry& entry, uint64_t seed, bool verify);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_MIX_H_
