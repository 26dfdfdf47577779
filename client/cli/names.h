// Enum values as people write them: `log_row_column` for NORMALIZATION_RECIPE_LOG_ROW_COLUMN.
#ifndef SINKHORN_CLIENT_CLI_NAMES_H_
#define SINKHORN_CLIENT_CLI_NAMES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace sinkhorn::client {

// "tolerance" for STOP_REASON_TOLERANCE; the number, for a value that this program does not know.
std::string ShortName(const google::protobuf::EnumDescriptor* type, int value);

// All names but "unspecified", separated by ", ".
std::string ShortNames(const google::protobuf::EnumDescriptor* type);

// INVALID_ARGUMENT, with the names to choose from, for any other text.
absl::StatusOr<int> FromShortName(const google::protobuf::EnumDescriptor* type, absl::string_view name);

template <typename Enum>
std::string ShortName(Enum value) {
  return ShortName(google::protobuf::GetEnumDescriptor<Enum>(), value);
}

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_NAMES_H_
