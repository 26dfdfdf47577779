// Messages as JSON for programs: numbers are numbers, enums are short names (names.h), a tensor is what the caller
// says.
#ifndef SINKHORN_CLIENT_CLI_JSON_H_
#define SINKHORN_CLIENT_CLI_JSON_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// A quoted string.
std::string JsonString(absl::string_view text);

// A short number that reads back as `value`; null for NaN and infinity, which JSON lacks.
std::string JsonNumber(double value);
std::string JsonNumber(float value);

// JSON of the tensor in field `name`.
using TensorToJson = std::function<std::string(const std::string& name, const v1::Tensor& tensor)>;

// The members of an object, without its braces: `"iterations": 12, "converged": true`. Messages and lists that are
// absent are left out; other fields are always there.
std::string JsonMembers(const google::protobuf::Message& message, const TensorToJson& tensor_to_json = nullptr);

// Nested lists of the tensor's elements.
std::string JsonElements(const v1::Tensor& tensor);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_JSON_H_
