// Any bytes as the details of an error, as the client reads them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "client/cpp/errors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sinkhorn::client;
  const std::string details(reinterpret_cast<const char*>(data), size);
  const absl::Status status = FromGrpcStatus(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no", details));
  if (status.code() != absl::StatusCode::kInvalidArgument) std::abort();
  GetErrorDetails(status);
  if (Describe(status).empty()) std::abort();
  return 0;
}
