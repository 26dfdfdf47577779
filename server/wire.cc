#include "server/wire.h"

#include <cstring>

#include "google/protobuf/descriptor.h"

namespace sinkhorn {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

// What stands in a decoded tensor's `data`: where the real bytes are.
struct Reference {
  uint64_t offset;
  uint64_t size;
};

// ---- Reading --------------------------------------------------------------------------------------------------------

bool ReadVarint(absl::string_view* in, uint64_t* value) {
  uint64_t result = 0;
  for (size_t i = 0; i < in->size() && i < 10; ++i) {
    const uint8_t byte = static_cast<uint8_t>((*in)[i]);
    result |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      in->remove_prefix(i + 1);
      *value = result;
      return true;
    }
  }
  return false;
}

bool Skip(absl::string_view* in, size_t bytes) {
  if (in->size() < bytes) return false;
  in->remove_prefix(bytes);
  return true;
}

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void AppendLengthDelimited(uint64_t tag, absl::string_view payload, std::string* out) {
  AppendVarint(tag, out);
  AppendVarint(payload.size(), out);
  out->append(payload.data(), payload.size());
}

// Appends the message `in` of type `type` to `out`, with each tensor's data replaced by a reference relative to `base`.
// The depth is that of the schema, which is not recursive: unknown fields are copied, not entered.
bool AppendWithReferences(absl::string_view in, const Descriptor* type, const char* base, std::string* out) {
  while (!in.empty()) {
    const char* const begin = in.data();
    uint64_t tag = 0, ignored = 0, length = 0;
    if (!ReadVarint(&in, &tag) || tag > 0xffffffff) return false;
    switch (tag & 7) {
      case kVarint:
        if (!ReadVarint(&in, &ignored)) return false;
        break;
      case kFixed64:
        if (!Skip(&in, 8)) return false;
        break;
      case kFixed32:
        if (!Skip(&in, 4)) return false;
        break;
      case kLengthDelimited: {
        if (!ReadVarint(&in, &length) || length > in.size()) return false;
        const absl::string_view payload = in.substr(0, length);
        in.remove_prefix(length);
        const FieldDescriptor* field = type->FindFieldByNumber(static_cast<int>(tag >> 3));
        if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
          std::string child;
          if (!AppendWithReferences(payload, field->message_type(), base, &child)) return false;
          AppendLengthDelimited(tag, child, out);
          continue;
        }
        if (type == v1::Tensor::descriptor() && field != nullptr && field->number() == v1::Tensor::kDataFieldNumber) {
          const Reference reference = {static_cast<uint64_t>(payload.data() - base), length};
          char packed[sizeof(reference)];
          std::memcpy(packed, &reference, sizeof(reference));
          AppendLengthDelimited(tag, {packed, sizeof(packed)}, out);
          continue;
        }
        break;
      }
      default:
        return false;
    }
    out->append(begin, in.data() - begin);
  }
  return true;
}

// ---- Writing --------------------------------------------------------------------------------------------------------

uint64_t LengthDelimitedTag(int field) { return static_cast<uint64_t>(field) << 3 | kLengthDelimited; }

// A Tensor message up to where its data begins.
std::string TensorHead(const ReplyTensor& tensor) {
  std::string shape, head;
  for (int64_t extent : tensor.shape) AppendVarint(static_cast<uint64_t>(extent), &shape);
  AppendVarint(v1::Tensor::kDtypeFieldNumber << 3 | kVarint, &head);
  AppendVarint(tensor.dtype, &head);
  if (!shape.empty()) AppendLengthDelimited(LengthDelimitedTag(v1::Tensor::kShapeFieldNumber), shape, &head);
  AppendVarint(LengthDelimitedTag(v1::Tensor::kDataFieldNumber), &head);
  AppendVarint(tensor.bytes, &head);
  return head;
}

}  // namespace

bool DecodeWithoutTensors(absl::string_view bytes, google::protobuf::Message* message) {
  std::string skeleton;
  return AppendWithReferences(bytes, message->GetDescriptor(), bytes.data(), &skeleton) &&
         message->ParseFromString(skeleton);
}

absl::string_view TensorData(absl::string_view bytes, const v1::Tensor& tensor) {
  if (tensor.data().size() != sizeof(Reference)) return {};  // The field was absent.
  Reference reference;
  std::memcpy(&reference, tensor.data().data(), sizeof(reference));
  return bytes.substr(reference.offset, reference.size);
}

std::vector<WirePiece> EncodeResponse(const v1::SolveResponse& response, absl::Span<const ReplyTensor> tensors,
                                      absl::optional<absl::string_view> stream_request_id) {
  std::vector<WirePiece> pieces(1 + tensors.size());
  std::string rest = response.SerializeAsString();
  uint64_t total = rest.size();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string head = TensorHead(tensors[i]);
    WirePiece* piece = &pieces[i + 1];
    piece->tensor = &tensors[i];
    AppendVarint(LengthDelimitedTag(tensors[i].field), &piece->head);
    AppendVarint(head.size() + tensors[i].bytes, &piece->head);
    piece->head += head;
    total += piece->head.size() + tensors[i].bytes;
  }
  if (stream_request_id.has_value()) {
    std::string* head = &pieces[0].head;
    AppendLengthDelimited(LengthDelimitedTag(v1::SolveStreamResponse::kRequestIdFieldNumber), *stream_request_id, head);
    AppendVarint(LengthDelimitedTag(v1::SolveStreamResponse::kSolveFieldNumber), head);
    AppendVarint(total, head);
  }
  pieces[0].head += rest;
  return pieces;
}

}  // namespace sinkhorn
