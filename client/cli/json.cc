#include "client/cli/json.h"

#include <cmath>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/names.h"
#include "client/cpp/tensor.h"

namespace sinkhorn::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// `index`: -1 for a field that is not repeated.
std::string Value(const Message& message, const FieldDescriptor* field, int index, const TensorToJson& tensor_to_json) {
  const Reflection* reflection = message.GetReflection();
  const bool repeated = index >= 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(repeated ? reflection->GetRepeatedInt32(message, field, index)
                                   : reflection->GetInt32(message, field));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(repeated ? reflection->GetRepeatedInt64(message, field, index)
                                   : reflection->GetInt64(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return JsonNumber(repeated ? reflection->GetRepeatedDouble(message, field, index)
                                 : reflection->GetDouble(message, field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return (repeated ? reflection->GetRepeatedBool(message, field, index) : reflection->GetBool(message, field))
                 ? "true"
                 : "false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return JsonString(ShortName(field->enum_type(), repeated ? reflection->GetRepeatedEnumValue(message, field, index)
                                                               : reflection->GetEnumValue(message, field)));
    case FieldDescriptor::CPPTYPE_STRING:
      return JsonString(repeated ? reflection->GetRepeatedString(message, field, index)
                                 : reflection->GetString(message, field));
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      const Message& child =
          repeated ? reflection->GetRepeatedMessage(message, field, index) : reflection->GetMessage(message, field);
      if (child.GetDescriptor() == v1::Tensor::descriptor() && tensor_to_json) {
        return tensor_to_json(field->name(), static_cast<const v1::Tensor&>(child));
      }
      return absl::StrCat("{", JsonMembers(child, tensor_to_json), "}");
    }
    default:  // The contract has no other types.
      return "null";
  }
}

// The elements of dimension `dimension` on, from values[*next].
template <typename T>
void AppendNested(const v1::Tensor& tensor, const std::vector<T>& values, int dimension, size_t* next,
                  std::string* out) {
  if (dimension == tensor.shape_size()) {
    out->append(JsonNumber(values[(*next)++]));
    return;
  }
  out->push_back('[');
  for (int64_t i = 0; i < tensor.shape(dimension); ++i) {
    if (i > 0) out->append(", ");
    AppendNested(tensor, values, dimension + 1, next, out);
  }
  out->push_back(']');
}

}  // namespace

std::string JsonString(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out.append("\\\"");
        break;
      case '\\':
        out.append("\\\\");
        break;
      case '\n':
        out.append("\\n");
        break;
      case '\t':
        out.append("\\t");
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
        } else {
          out.push_back(c);
        }
    }
  }
  out.push_back('"');
  return out;
}

std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  const std::string text = absl::StrFormat("%.15g", value);
  return std::strtod(text.c_str(), nullptr) == value ? text : absl::StrFormat("%.17g", value);
}

std::string JsonNumber(float value) {
  if (!std::isfinite(value)) return "null";
  const std::string text = absl::StrFormat("%.6g", value);
  return std::strtof(text.c_str(), nullptr) == value ? text : absl::StrFormat("%.9g", value);
}

std::string JsonMembers(const Message& message, const TensorToJson& tensor_to_json) {
  const Reflection* reflection = message.GetReflection();
  std::vector<std::string> members;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    std::string value;
    if (field->is_repeated()) {
      std::vector<std::string> items;
      for (int j = 0; j < reflection->FieldSize(message, field); ++j) {
        items.push_back(Value(message, field, j, tensor_to_json));
      }
      if (items.empty()) continue;
      value = absl::StrCat("[", absl::StrJoin(items, ", "), "]");
    } else {
      if (field->has_presence() && !reflection->HasField(message, field)) continue;
      value = Value(message, field, -1, tensor_to_json);
    }
    members.push_back(absl::StrCat(JsonString(field->name()), ": ", value));
  }
  return absl::StrJoin(members, ", ");
}

std::string JsonElements(const v1::Tensor& tensor) {
  std::string out;
  size_t next = 0;
  if (!CheckTensor(tensor).ok()) return "null";
  if (tensor.dtype() == v1::DATA_TYPE_FLOAT64) {
    AppendNested(tensor, *ToDoubles(tensor), 0, &next, &out);
  } else {
    AppendNested(tensor, *ToFloats(tensor), 0, &next, &out);
  }
  return out;
}

}  // namespace sinkhorn::client
