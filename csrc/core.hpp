// The C++ core on plain pointers and sizes, without Python or torch: only bindings/ knows Python.
//
// Sections of a frame may start at any address, so bytes are read and written with memcpy; float tensors are aligned to
// their elements. src/laconic/kernels/reference/ defines the bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace laconic {

constexpr int64_t kGroup = 256;          // values per group of the vertical packing: 32 rows of 8 SIMD lanes
constexpr int64_t kTritGroupBytes = 64;  // bytes per group of the base-3 packing, five values each
constexpr int64_t kSplit = 65536;        // threads split a tensor at multiples of this; every bucket size divides it
constexpr int64_t kBatch = 2048;         // values whose norms are computed together
constexpr uint32_t kNonFinite = 0x7F800000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr int64_t kSamples = 65536;        // values that a sampled threshold looks at
constexpr int64_t kStreamBytes = 8 << 20;  // outputs of this size or more bypass the cache
constexpr int64_t kSumBlock = 1024;        // values that share a scale, and are rotated together, in summable codecs

// The two words of a hash stream's key; see kernels/random.py.
struct HashKey {
  uint32_t low, high;
};

inline int64_t packed_nbytes(int64_t n, int bits) { return n / kGroup * 32 * bits + (n % kGroup * bits + 7) / 8; }

inline uint32_t hash32(uint64_t counter, HashKey key) {
  uint32_t h = static_cast<uint32_t>(counter) ^ key.low ^ (static_cast<uint32_t>(counter >> 32) * 0x9E3779B9u);
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= (h >> 15) ^ key.high;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}

// Arguments of a quantizer that keeps a few floats per bucket.
struct BucketEncode {
  const float* x;
  int64_t n;
  int bits;        // qsgd: 2 to 12; bins: 1 to 4
  int64_t bucket;  // a power of two, 128 to 65536 (qsgd_decode: any number from 129 on if no bucket ends within)
  bool l2, stochastic;
  HashKey key;
  uint8_t* floats;  // norms, scales or means
  uint8_t* packed;
  float* scratch;  // max(bucket, kBatch) floats, used by the last range only
  float slope = 0, offset = 0;  // bins: see BinCoding of kernels/interface.py
  const float* norm = nullptr;  // qsgd: the norm of all values; not null if they share one, and bucket is kSplit then
};

// Stores into out, or adds weight * value to it.
struct Sink {
  float* out;
  int64_t n;
  bool accumulate;
  float weight;
};

struct BucketDecode {
  const uint8_t* floats;
  const uint8_t* packed;
  int bits;
  int64_t bucket;
  Sink sink;
};

struct UniformCoding {
  double low, high;
  int levels, bits;
};

// Bins of equal width in float32: symbol = (x * pre - base) * inverse, truncated and clamped to [0, levels - 1].
struct LinearGrid {
  float pre, base, inverse;
  int levels;
};

// Integers from 0 to levels of `width` bits: in the vertical packing, or in 32-bit words that no integer straddles.
struct PackedIntCoding {
  int levels, width;
  bool packed;
};

struct PackedIntEncode {
  const float* x;
  int64_t n;
  PackedIntCoding coding;
  bool own_clips;  // compute each block's clip as `factor` times its scale and write it; otherwise clips are given
  float factor;
  bool rotate;  // a rotated block's scale is its root mean square, another's its largest magnitude
  HashKey signs;
  bool stochastic;
  HashKey noise;
  uint8_t* clips;
  uint8_t* out;
  float* feedback;  // null, or x itself: the decoded values are subtracted from it
};

struct PackedIntDecode {
  const uint8_t* integers;
  const uint8_t* clips;
  PackedIntCoding coding;
  int32_t total;  // levels times participants: the sum that stands for one clip
  bool rotate;
  HashKey signs;
  Sink sink;
};

// A matrix and the rank it is projected to. P is rows x rank and Q is rank x columns, both row-major.
struct LowRank {
  const float* x;
  int64_t rows, columns;
  int rank;
};

// --- entropy coding
constexpr int kMaxAlphabet = 4096;       // symbols of at most 12 bits
constexpr int64_t kChunk = 1 << 19;      // symbols that share a code table
constexpr int kMaxLength = 15;           // bits of the longest code, and of rANS frequencies
constexpr int kHuffmanStreams = 30;      // of a large chunk
constexpr int kRansStates = 32;          // interleaved states of a large chunk
constexpr uint32_t kRansLow = 1u << 15;  // states lie in [2^15, 2^31)

// A bit stream under construction: `count` bits, fewer than eight, wait at the top of `held`.
struct BitSink {
  uint8_t* at;
  uint64_t held;
  int count;
};

struct HuffmanRead {
  const uint8_t* bits;
  int64_t nbytes;
  const uint64_t* table;  // 2^longest entries: the value in the upper half, the code's length in the lowest byte
  int longest, streams;
  int64_t each, n;       // symbols of every stream but the last, and of all
  const int64_t* start;  // the bit at which each stream begins

  int64_t count(int stream) const { return stream + 1 < streams ? each : n - each * (streams - 1); }
  // A stream must end where the next begins; the last one in the last byte, followed by zeros.
  bool ends_well(int stream, int64_t bit) const {
    if (stream + 1 < streams) return bit == start[stream + 1];
    return bit >= 0 && (bit + 7) / 8 == nbytes && (bit % 8 == 0 || bits[nbytes - 1] >> (bit % 8) == 0);
  }
};

struct RansWrite {
  // By symbol: 16 bits of frequency f, 16 of its first slot, 32 of ceil(2^(31 + ceil(log2 f)) / f).
  const uint64_t* table;
  int scale, num_states;
};
struct RansRead {
  const uint32_t* step;   // by slot: 16 bits of frequency, 16 of the slot's index among those of its symbol
  const uint32_t* value;  // by slot
  const uint8_t *states, *words, *end;
  int scale, num_states;
};

// A tensor that is filled from its first value to its last, by way of a window in L1.
constexpr int64_t kWindow = 2048;
struct WindowedOutput {
  float* out;
  int64_t n, at;  // the window holds the values from `at` on
  float* window;  // kWindow floats, zero at first
};

// Growing arrays of the entries that a selector kept: offsets from a base, and the raw 32 bits of each value.
struct Kept {
  uint32_t* offset;
  uint32_t* bits;
  int64_t count, capacity;
};

// The hot loops of simd/table.inc, compiled once per instruction set.
struct Simd {
  const char* name;
#define LOOP(name, result, parameters) result(*name) parameters;
#include "simd/table.inc"
#undef LOOP
};

const Simd& simd();                   // of this machine, chosen once; the environment variable LACONIC_ISA can lower it
const Simd* simd_named(const char*);  // null if unknown or not supported by this machine

uint32_t crc32c(const uint8_t* data, size_t nbytes);

// --- frame_header.cpp
constexpr int kMaxSections = 8;
struct FrameHeader {
  int dtype, ndim, num_sections, spec_nbytes;
  uint64_t numbers[16 + kMaxSections];  // the dimensions, then the bytes of each section
  const char* spec;
  int64_t start;               // of the payload
  int64_t gaps[kMaxSections];  // bytes of padding before each section
  uint32_t payload_crc;
};
// Whether the bytes are a frame in which everything but the payload's checksum, the dtype and the dimensions was found in
// order.
bool read_frame_header(const uint8_t* data, int64_t size, FrameHeader* header);

// --- thread_pool.cpp
// Runs task(i) for i in [0, tasks) on up to `threads` threads, the caller's included.
void parallel(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& body) {
  parallel(tasks, threads, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body);
}

// Calls body(begin, end) for ranges of `step` values that cover [0, n), on up to `threads` threads.
template <class F>
void for_ranges(int64_t n, int64_t step, int threads, F body) {
  const int64_t ranges = (n + step - 1) / step;
  if (threads <= 1 || ranges == 1) return body(int64_t{0}, n);
  parallel_for(ranges, threads, [&](int64_t i) { body(i * step, i * step + step < n ? i * step + step : n); });
}
// The largest result of body over all ranges.
template <class F>
uint32_t max_over_ranges(int64_t n, int64_t step, int threads, F body) {
  std::atomic<uint32_t> largest{0};
  for_ranges(n, step, threads, [&](int64_t begin, int64_t end) {
    const uint32_t result = body(begin, end);
    for (uint32_t seen = largest.load(); seen < result && !largest.compare_exchange_weak(seen, result);) {
    }
  });
  return largest.load();
}
// Whether body returns true for every range.
template <class F>
bool all_ranges(int64_t n, int64_t step, int threads, F body) {
  std::atomic<bool> all{true};
  for_ranges(n, step, threads, [&](int64_t begin, int64_t end) {
    if (!body(begin, end)) all = false;
  });
  return all.load();
}

// --- quantizers.cpp: whole tensors, on several threads
using EncodeLoop = uint32_t (*)(const BucketEncode&, int64_t, int64_t);
using DecodeLoop = bool (*)(const BucketDecode&, int64_t, int64_t);
uint32_t encode_buckets(EncodeLoop loop, BucketEncode args, int64_t step, int threads);
uint32_t qsgd_encode_whole(BucketEncode args, int threads);  // one norm for all values
bool decode_buckets(DecodeLoop loop, const BucketDecode& args, int64_t step, int threads);

struct ValueRange {
  float low, high;
  uint32_t amax_bits;
};
ValueRange value_range(const float* x, int64_t n, int threads);
// One value out of each of `count` equal parts of x, chosen by a hash.
void sample(const float* x, int64_t n, int64_t count, HashKey key, float* out, int threads);
void histogram(const float* x, int64_t n, const LinearGrid& grid, int64_t* counts, int threads);

// --- topk.cpp, random_positions.cpp, sparse.cpp
// The k entries of largest magnitude in ascending order; among equals the lowest index wins. Returns the amax bits.
template <class Index>
uint32_t topk(const float* x, int64_t n, int64_t k, Index* positions, float* values, int threads);
template <class Index>
void topk_double(const double* x, int64_t n, int64_t k, Index* positions, double* values);
// About k entries by a sampled threshold; capacity 2 k + 16. Returns their number, or -1 if the caller must use topk.
template <class Index>
int64_t topk_sampled(const float* x, int64_t n, int64_t k, HashKey key, Index* positions, float* values, int threads);
int64_t count_threshold(const float* x, int64_t n, uint32_t threshold, int threads);
// Returns how many entries were written, at most `capacity`, and their amax bits.
template <class Index>
int64_t threshold_select(const float* x, int64_t n, uint32_t threshold, Index* positions, float* values,
                         int64_t capacity, uint32_t* amax_bits);
template <class Index>
void random_positions(int64_t n, int64_t k, HashKey key, Index* positions, int threads);
// The same, and the values of x there in one pass over it. Returns the amax bits of x.
template <class Index>
uint32_t random_entries(const float* x, int64_t n, int64_t k, HashKey key, Index* positions, float* values,
                        int threads);
// The entries that topk keeps, whose positions go to `section`. Returns its bytes.
int64_t topk_encode(const float* x, int64_t n, int64_t k, float* values, uint8_t* section, uint32_t* amax_bits,
                    int threads);
// Scatters k finite values to the positions of a section. False, with `sink` unchanged or to be written again, if the
// section holds anything but k positions in order, in a mode of this file.
bool sparse_decode(const uint8_t* section, int64_t nbytes, const float* values, int64_t k, const Sink& sink,
                   int threads);
template <class Index, class Word>
void gather(const Word* x, const Index* positions, int64_t k, Word* out, int threads);
// Values times a gain, saturating; false if one of the values is not finite.
bool scale_saturating(const float* values, int64_t k, float gain, float* out);

// --- chunked_topk.cpp
// Chunks of `chunk` consecutive values, a divisor of kSplit: each of them keeps `each` entries, the final one `last`.
struct ChunkCounts {
  int64_t chunk, each, last;
};
// topk and topk_double of each chunk, one behind the other.
template <class Index>
uint32_t topk_chunks(const float* x, int64_t n, const ChunkCounts& counts, Index* positions, float* values,
                     int threads);
template <class Index>
void topk_chunks_double(const double* x, int64_t n, const ChunkCounts& counts, Index* positions, double* values,
                        int threads);

// --- positions.cpp
enum class PositionMode : int { all = 0, rice = 1, bitmap = 2, contexts = 5 };
constexpr int64_t kPositionsHeader = 8;
constexpr int64_t kSetBitsSlack = 64 + 8;
constexpr int kMaxLowBits = 31;
struct PositionPlan {
  PositionMode mode;
  int low_bits;
  int64_t nbytes;
};
template <class Index>
PositionPlan plan_positions(const Index* positions, int64_t k, int64_t n);
template <class Index>
void write_positions(const Index* positions, int64_t k, const PositionPlan& plan, uint8_t* out);
// The fields of a section's header; false if they contradict n or the size, or the mode is not one of the first three.
struct PositionHeader {
  PositionMode mode;
  int low_bits;
  int64_t k;
};
bool read_positions_header(const uint8_t* section, int64_t nbytes, int64_t n, PositionHeader* header);
// Writes values to the positions of a section without a list of them; false if the body does not hold k positions, or if
// a value is not finite.
bool scatter_positions(const uint8_t* body, int64_t nbytes, const PositionHeader& header, const float* values,
                       const Sink& sink);
// False if the body does not hold k ascending positions below n. The caller has checked the header.
template <class Index>
bool read_positions(const uint8_t* body, int64_t nbytes, PositionMode mode, int low_bits, int64_t k, int64_t n,
                    Index* positions);
// Writes the class of each gap, and the bits that tell the gaps of a class apart. Returns the bytes of the latter.
template <class Index>
int64_t split_gaps(const Index* positions, int64_t k, uint8_t* classes, uint8_t* low);
// False if classes and low bits do not give k positions below n, or the low bits end elsewhere. Classes are below 132.
template <class Index>
bool join_gaps(const uint8_t* classes, int64_t k, int64_t n, const uint8_t* low, int64_t nbytes, Index* positions);

// --- contexts.cpp
constexpr int64_t kContextsHeader = 16, kChunkedContextsHeader = 20;
constexpr int kMaxPrior = 9;
// The matrix whose positions are coded, and how much chance is in the counts of its rows and columns: 2^(prior - 3)
// positions at the mean rate are added to each. With chunk_bits, every chunk of 2^chunk_bits values has `each` positions,
// the last one the rest, and there is no prior of rows.
struct ContextHeader {
  int64_t columns;
  int row_prior, column_prior, chunk_bits;
  int64_t each;
};
// Writes a section of k < n ascending positions in at most `capacity` bytes. Returns its bytes; 0 if there is no room for
// them, -1 if they are not ascending ones below n, or a chunk does not have as many as the arguments say.
template <class Index>
int64_t write_contexts(const Index* positions, int64_t k, int64_t n, int64_t columns, int chunk_bits, int64_t each,
                       uint8_t* out, int64_t capacity);
// False if the body is not what write_contexts writes for k positions below n. The caller has checked the header.
template <class Index>
bool read_contexts(const uint8_t* body, int64_t nbytes, const ContextHeader& header, int64_t k, int64_t n,
                   Index* positions);

// --- code_tables.cpp: Huffman lengths and rANS frequencies, and their bytes
// Lengths of an optimal prefix code whose longest length is limited by the number of symbols that occur (at least two);
// 0 for symbols that do not occur. Returns the longest length.
int code_lengths(const uint32_t* counts, int alphabet, uint8_t* lengths);
// Frequencies that sum to 2^scale, proportional to the counts and at least 1 for each symbol that occurs. At least two
// symbols occur, and at most 2^scale / 4.
void scale_frequencies(const uint32_t* counts, int alphabet, int64_t n, int scale, uint32_t* frequencies);
// log2(f) in units of 2^-16, for 1 <= f <= 2^15.
uint32_t log2_fixed(uint32_t f);
// Writes a class per symbol (0: does not occur) and, with `mantissa`, the bits of a frequency below its leading one.
// Returns the number of bytes; `out` may be null to only count them.
int64_t write_code_table(const uint8_t* classes, const uint32_t* mantissa, int alphabet, uint8_t* out);
// Reads classes and, if `frequencies` is not null, frequencies. Returns the bytes read, or -1 if the table is invalid.
int64_t read_code_table(const uint8_t* in, int64_t nbytes, int alphabet, uint8_t* classes, uint32_t* frequencies);

// --- entropy_encoder.cpp, entropy_decoder.cpp, symbol_packing.cpp: sections of coded symbols
enum class Coding : int { huffman = 0, rans = 1, huffman_auto = 2, rans_auto = 3 };
int64_t coded_max_nbytes(int64_t n, int alphabet);  // the most bytes of a section
// The symbols of a tensor: given (one or two bytes each, by alphabet), or quantized chunk by chunk on one of two grids.
struct Symbols {
  const void* ready;
  const float* x;
  const LinearGrid* linear;
  const UniformCoding* uniform;
};
void grid_symbols(const Symbols& source, int64_t n, int alphabet, void* out, int threads);
// Returns the bytes of the section. `out` has coded_max_nbytes bytes.
int64_t encode_symbols(const Symbols& source, int64_t n, int alphabet, Coding coding, uint8_t* out, int threads);
// False if no encoder writes the section. Writes symbols, or their values in a table of `alphabet` entries.
bool decode_symbols(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, void* symbols, int threads);
bool decode_values(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, const float* table, Sink,
                   int threads);
// Bytes of the Huffman-coded section of a chunk with these counts.
int64_t huffman_nbytes(const uint32_t* counts, int alphabet);
// Between a quantizer's packed symbols and plain ones (a byte each, or two if the alphabet exceeds 256).
void unpack_symbols(const uint8_t* packed, int64_t n, int alphabet, bool trits, void* symbols);
void pack_symbols(const void* symbols, int64_t n, int alphabet, bool trits, uint8_t* packed);
// The mode of each chunk of a section, one byte each; false if the section is invalid.
bool chunk_modes(const uint8_t* section, int64_t nbytes, int64_t n, uint8_t* modes);

}  // namespace laconic
