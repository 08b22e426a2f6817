// The header of a frame, read at once if the whole frame is in order. wire/frame.py reads a frame in which something is wrong
// again, step by step, and names the defect.

#include "core.hpp"

#include <cstring>

namespace laconic {
namespace {

constexpr int kMaxDims = 16, kMaxSpec = 256;
constexpr uint8_t kVersion = 1, kWide = 2;
constexpr int64_t kFixed = 24, kCrc = 4;

int64_t aligned(int64_t nbytes) { return (nbytes + 15) & -16; }

template <class T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool all_zero(const uint8_t* at, int64_t nbytes) {
  uint8_t any = 0;
  for (int64_t i = 0; i < nbytes; ++i) any |= at[i];
  return any == 0;
}

}  // namespace

bool read_frame_header(const uint8_t* data, int64_t size, FrameHeader* header) {
  if (size < kFixed || std::memcmp(data, "LACO", 4) != 0 || data[4] != kVersion) return false;
  const uint8_t flags = data[5];
  if ((flags & ~kWide) || data[11]) return false;
  header->dtype = data[6];
  header->ndim = data[7];
  header->spec_nbytes = read<uint16_t>(data + 8);
  header->num_sections = data[10];
  const uint64_t payload = read<uint64_t>(data + 12);
  header->payload_crc = read<uint32_t>(data + 20);
  if (header->ndim > kMaxDims || header->num_sections > kMaxSections) return false;
  if (header->spec_nbytes < 1 || header->spec_nbytes > kMaxSpec) return false;
  const int count = header->ndim + header->num_sections, width = flags & kWide ? 8 : 4;
  const int64_t text = kFixed + count * width, padding = text + header->spec_nbytes, end = aligned(padding + kCrc);
  if (size < end || static_cast<uint64_t>(size - end) != payload) return false;
  if (crc32c(data, static_cast<size_t>(end - kCrc)) != read<uint32_t>(data + end - kCrc)) return false;
  if (!all_zero(data + padding, end - kCrc - padding)) return false;
  for (int i = 0; i < count; ++i) {
    const uint8_t* at = data + kFixed + i * width;
    header->numbers[i] = width == 8 ? read<uint64_t>(at) : read<uint32_t>(at);
  }
  header->spec = reinterpret_cast<const char*>(data + text);
  for (int64_t i = text; i < padding; ++i) {
    if (data[i] >= 128) return false;
  }
  header->start = end;
  int64_t offset = end;
  for (int i = 0; i < header->num_sections; ++i) {
    const uint64_t nbytes = header->numbers[header->ndim + i];
    const int64_t begin = aligned(offset);
    if (begin > size || nbytes > static_cast<uint64_t>(size - begin)) return false;
    if (!all_zero(data + offset, begin - offset)) return false;
    header->gaps[i] = begin - offset;
    offset = begin + static_cast<int64_t>(nbytes);
  }
  return offset == size;
}

}  // namespace laconic
