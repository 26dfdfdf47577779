// The input tensors of one request: their shapes against each other, the batch they span, their limits and contents.
//
// A tensor [..., core] has leading extents of the batch, or none and is shared by all members. Usage: Add each tensor
// with its expected core extents, check limits, then Scan. Nothing is allocated in proportion to a size that a request
// states.
#ifndef SINKHORN_SERVER_TENSOR_CHECK_H_
#define SINKHORN_SERVER_TENSOR_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "kernels/problem.h"
#include "server/scan.h"
#include "server/status.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Products and sums that stop at the largest int64 instead of overflowing. REQUIRES: arguments >= 0.
int64_t SaturatingProduct(int64_t a, int64_t b);
int64_t SaturatingSum(int64_t a, int64_t b);

v1::DataType ToProto(DType dtype);
// Unset: none of them.
absl::optional<DType> FromProto(v1::DataType dtype);

// One trailing extent of a tensor: its name and where its value is. 0: not known yet, taken from this tensor.
struct Extent {
  const char* name;
  int64_t* value;
};

class TensorCheck {
 public:
  // `bytes`: what the request was decoded from.
  explicit TensorCheck(absl::string_view bytes) : bytes_(bytes) {}

  // Checks `tensor`'s dtype, shape and length and makes `view` of it. `field` is its path in the request.
  absl::optional<Error> Add(absl::string_view field, const v1::Tensor& tensor, std::initializer_list<Extent> core,
                            ElementRule rule, TensorView* view);

  // The batch dimensions, empty if no tensor has any, and their product.
  const std::vector<int64_t>& leading() const { return leading_; }
  int64_t count() const;
  // Bytes of all tensors added.
  int64_t total_bytes() const { return total_bytes_; }

  // Looks at the contents of every tensor added.
  absl::optional<Error> Scan() const;

 private:
  struct Added {
    std::string field;
    TensorView view;
    int64_t elements;
    ElementRule rule;
  };

  absl::optional<Error> CheckBatch(const std::string& shape_field, const v1::Tensor& tensor, int leading_rank);

  absl::string_view bytes_;
  std::vector<int64_t> leading_;
  std::string leading_owner_;  // The field that brought the leading dimensions.
  std::vector<Added> added_;
  int64_t total_bytes_ = 0;
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_TENSOR_CHECK_H_
