#include "server/answer_check.h"

#include <cmath>

#include "server/scan.h"
#include "server/tensor_check.h"

namespace sinkhorn {
namespace {

bool AllFinite(const google::protobuf::RepeatedField<double>& values) {
  double sum = 0;
  for (double value : values) sum += value * 0;
  return sum == 0;  // NaN if any was not finite.
}

bool HasNan(const ReplyTensor& tensor, const char* block) {
  TensorView view;
  view.dtype = *FromProto(tensor.dtype);
  view.data = block + tensor.offset;
  return FirstViolation(view, static_cast<int64_t>(tensor.bytes / SizeOf(view.dtype)), ElementRule::kNotNan) >= 0;
}

}  // namespace

bool IsAnswer(const Convergence& convergence, const v1::SolveResponse& response, const Prepared& prepared) {
  if (!std::isfinite(convergence.marginal_error_a) || !std::isfinite(convergence.marginal_error_b)) return false;
  if (!AllFinite(response.value()) || !AllFinite(response.value_linear())) return false;
  for (const ReplyTensor& tensor : prepared.tensors) {
    if (HasNan(tensor, prepared.block.get())) return false;
  }
  return true;
}

}  // namespace sinkhorn
