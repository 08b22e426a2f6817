// The module: checksums, bytes at addresses, frames; the kernels are bound by the other files.

#include "bindings.hpp"

#include <nanobind/ndarray.h>

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace laconic;

namespace {

constexpr size_t kCopiedBytes = 1 << 14;  // wire.template.COPIED_NBYTES

// Any contiguous buffer as a uint8 tensor over the same memory, which it keeps alive. laconic only reads through it.
nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>> byte_view(
    nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
  if (data.itemsize() != 1) throw nb::type_error("expected a buffer of bytes");
  auto* bytes = const_cast<uint8_t*>(static_cast<const uint8_t*>(data.data()));
  return {bytes, {data.size()}, nb::cast(data)};
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ core of laconic. Private: laconic.kernels.cpu checks the arguments.";
  m.attr("isa") = simd().name;

  m.def("crc32c", [](Address data, size_t n) { return crc32c(at<const uint8_t>(data), n); }, Unlocked());
  m.def("crc32c_of",
        [](nb::bytes data) { return crc32c(reinterpret_cast<const uint8_t*>(data.c_str()), data.size()); });
  m.def("byte_view", &byte_view);
  m.def("bytes_at", [](Address data, size_t n) { return nb::bytes(at<const char>(data), n); });
  // The codec, shape, dtype code, and the bytes of header, padding and sections in turn, of a frame in order; else None.
  m.def("read_frame", [](Address data, int64_t size) -> nb::object {
    const uint8_t* bytes = at<const uint8_t>(data);
    FrameHeader header;
    if (!read_frame_header(bytes, size, &header)) return nb::none();
    const size_t payload = static_cast<size_t>(size - header.start);
    uint32_t crc;
    if (payload < kCopiedBytes) {  // waiting for the interpreter's lock would cost more
      crc = crc32c(bytes + header.start, payload);
    } else {
      nb::gil_scoped_release released;
      crc = crc32c(bytes + header.start, payload);
    }
    if (crc != header.payload_crc) return nb::none();
    nb::list shape, sizes;
    for (int i = 0; i < header.ndim; ++i) shape.append(header.numbers[i]);
    sizes.append(header.start);
    for (int i = 0; i < header.num_sections; ++i) {
      sizes.append(header.gaps[i]);
      sizes.append(header.numbers[header.ndim + i]);
    }
    return nb::make_tuple(nb::str(header.spec, static_cast<size_t>(header.spec_nbytes)), nb::tuple(shape),
                          header.dtype, sizes);
  });
  m.def("zero_bytes", [](Address to, size_t n) { std::memset(at<char>(to), 0, n); });
  m.def("set_bytes", [](Address to, nb::bytes from) { std::memcpy(at<char>(to), from.c_str(), from.size()); });

  // The page faults of fresh memory cost more than decoding into it; large pages make them a few hundred times fewer.
  m.def("advise_large_pages", [](Address data, size_t n) {
#if defined(__linux__)
    constexpr size_t page = 4096;
    const Address begin = (data + page - 1) / page * page, end = (data + n) / page * page;
    if (begin < end) madvise(at<void>(begin), end - begin, MADV_HUGEPAGE);  // only advice: a refusal is harmless
#else
    (void)data, (void)n;
#endif
  });

  bind_quantizers(m);
  bind_packed_ints(m);
  bind_selection(m);
  bind_coding(m);
}
