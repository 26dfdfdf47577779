// NumPy's .npy files, versions 1 and 2: float16, float32 and float64, C order, little-endian.
// (Format: numpy.lib.format; anything else is refused with a message that says what to do.)
#ifndef SINKHORN_CLIENT_CPP_NPY_H_
#define SINKHORN_CLIENT_CPP_NPY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// Reads a whole file. NOT_FOUND, PERMISSION_DENIED: the file cannot be opened. INVALID_ARGUMENT: its contents.
absl::StatusOr<v1::Tensor> ReadNpy(const std::string& path);

// The same from memory.
absl::StatusOr<v1::Tensor> ParseNpy(absl::string_view bytes);

// Writes `tensor` as version 1, or 2 for a header beyond 64 KiB; BFLOAT16, which NumPy lacks, as float32. A failed
// write leaves no file of that name behind that was not there before.
absl::Status WriteNpy(const std::string& path, const v1::Tensor& tensor);

// The bytes that WriteNpy writes.
absl::StatusOr<std::string> FormatNpy(const v1::Tensor& tensor);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_NPY_H_
