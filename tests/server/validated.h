// A request through decoding and validation.
#ifndef SINKHORN_TESTS_SERVER_VALIDATED_H_
#define SINKHORN_TESTS_SERVER_VALIDATED_H_

#include <memory>
#include <string>

#include "absl/types/optional.h"
#include "gtest/gtest.h"
#include "server/validate.h"
#include "server/wire.h"

namespace sinkhorn {

// With all that must outlive it.
struct Validated {
  std::string bytes;
  v1::SolveRequest request;
  v1::SolveResponse response;
  Prepared prepared;
  absl::optional<Error> error;
};

inline std::unique_ptr<Validated> Check(const v1::SolveRequest& request, const Limits& limits = Limits()) {
  auto run = std::make_unique<Validated>();
  run->bytes = request.SerializeAsString();
  EXPECT_TRUE(DecodeWithoutTensors(run->bytes, &run->request));
  run->error = Validate(run->bytes, run->request, limits, &run->prepared, &run->response);
  return run;
}

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SERVER_VALIDATED_H_
