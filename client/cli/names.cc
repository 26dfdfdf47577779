#include "client/cli/names.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace sinkhorn::client {
namespace {

// "STOP_REASON_" of STOP_REASON_UNSPECIFIED, the zero value of each enum of the contract.
absl::string_view PrefixOf(const google::protobuf::EnumDescriptor* type) {
  return absl::StripSuffix(type->value(0)->name(), "UNSPECIFIED");
}

}  // namespace

std::string ShortName(const google::protobuf::EnumDescriptor* type, int value) {
  const google::protobuf::EnumValueDescriptor* found = type->FindValueByNumber(value);
  if (found == nullptr) return absl::StrCat(value);
  return absl::AsciiStrToLower(absl::StripPrefix(found->name(), PrefixOf(type)));
}

std::string ShortNames(const google::protobuf::EnumDescriptor* type) {
  std::vector<std::string> names;
  for (int i = 1; i < type->value_count(); ++i) names.push_back(ShortName(type, type->value(i)->number()));
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<int> FromShortName(const google::protobuf::EnumDescriptor* type, absl::string_view name) {
  for (int i = 1; i < type->value_count(); ++i) {
    if (absl::AsciiStrToLower(name) == ShortName(type, type->value(i)->number())) return type->value(i)->number();
  }
  return absl::InvalidArgumentError(absl::StrCat("must be one of ", ShortNames(type), "; got ", name));
}

}  // namespace sinkhorn::client
