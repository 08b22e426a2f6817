// The core on plain pointers and sizes: no Python, no torch. bindings.cpp alone knows Python.
//
// Sections of a frame may start at any address, so bytes are read and written with memcpy; float tensors are aligned
// to their elements. What the bytes must be is defined by src/laconic/kernels/reference/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace laconic {

constexpr int64_t kGroup = 256;     // values per group of the vertical packing: 32 rows of 8 lanes
constexpr int64_t kTritLanes = 64;  // bytes per group of the base-3 packing, five values each
constexpr int64_t kSplit = 65536;   // work is split between threads at multiples of this: any bucket divides it
constexpr int64_t kBatch = 2048;    // values whose norms are found together
constexpr uint32_t kNonFinite = 0x7F800000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr int64_t kSamples = 65536;        // values looked at by a sampled threshold
constexpr int64_t kStreamBytes = 8 << 20;  // outputs from here on bypass the cache
constexpr int64_t kLaneBlock = 1024;       // values that share a scale, and are rotated together, in summable codecs

// The two words of a stream's key; see kernels/random.py.
struct Key {
  uint32_t low, high;
};

inline int64_t packed_nbytes(int64_t n, int bits) { return n / kGroup * 32 * bits + (n % kGroup * bits + 7) / 8; }

inline uint32_t hash32(uint64_t counter, Key key) {
  uint32_t h = static_cast<uint32_t>(counter) ^ key.low ^ (static_cast<uint32_t>(counter >> 32) * 0x9E3779B9u);
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= (h >> 15) ^ key.high;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}

struct BucketEncode {
  const float* x;
  int64_t n;
  int bits;        // qsgd: 2 to 12
  int64_t bucket;  // a power of two, 128 to 65536
  bool l2, stochastic;
  Key key;
  uint8_t* floats;  // norms, scales or means
  uint8_t* packed;
  float* scratch;  // max(bucket, kBatch) floats, used at the end only
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

// Bins of equal width in float32: symbol = (x * pre - base) * inverse, cut to a whole number from 0 to levels - 1.
struct LinearGrid {
  float pre, base, inverse;
  int levels;
};

// Integers from 0 to levels, `width` bits each: in the packing above, or in words of lanes that no integer straddles.
struct LaneCoding {
  int levels, width;
  bool packed;
};

struct LaneEncode {
  const float* x;
  int64_t n;
  LaneCoding coding;
  bool own;      // clips are found here, as `factor` times each block's scale, and written; otherwise they are given
  float factor;
  bool rotate;   // and then a block's scale is its root mean square, otherwise its largest magnitude
  Key signs;
  bool stochastic;
  Key noise;
  uint8_t* clips;
  uint8_t* out;
  float* feedback;  // null, or x itself: what these symbols say is then taken away from it
};

struct LaneDecode {
  const uint8_t* lanes;
  const uint8_t* clips;
  LaneCoding coding;
  int32_t total;  // levels times participants: the sum that stands for one clip
  bool rotate;
  Key signs;
  Sink sink;
};

// A matrix and the rank of what it is projected to. P is rows x rank; Q is rank x columns, so that both lie row by row.
struct LowRank {
  const float* x;
  int64_t rows, columns;
  int rank;
};

// --- entropy coding
constexpr int kMaxAlphabet = 4096;        // symbols of at most 12 bits
constexpr int64_t kChunk = 1 << 19;       // symbols that share a codebook
constexpr int kMaxLength = 15;            // bits of the longest code, and of rANS frequencies
constexpr int kHuffmanStreams = 30;       // of a large chunk
constexpr int kRansLanes = 32;            // of a large chunk
constexpr uint32_t kRansLow = 1u << 15;   // states lie in [2^15, 2^31)

// A bit stream under construction: `count` bits, fewer than eight, wait at the top of `held`.
struct BitSink {
  uint8_t* at;
  uint64_t held;
  int count;
};

struct HuffmanRead {
  const uint8_t* bits;
  int64_t nbytes;
  const uint64_t* table;  // 2^longest entries: the value above, the code's length in the lowest byte
  int longest, streams;
  int64_t each, n;       // symbols of every stream but the last, and of all
  const int64_t* start;  // the bit at which each stream begins

  int64_t count(int stream) const { return stream + 1 < streams ? each : n - each * (streams - 1); }
  // A stream ends where the next begins; the last in the last byte, with zeros behind it.
  bool ends_well(int stream, int64_t bit) const {
    if (stream + 1 < streams) return bit == start[stream + 1];
    return bit >= 0 && (bit + 7) / 8 == nbytes && (bit % 8 == 0 || bits[nbytes - 1] >> (bit % 8) == 0);
  }
};

struct RansWrite {
  // By symbol: 16 bits of frequency f, 16 of where its slots start, 32 of ceil(2^(31 + ceil(log2 f)) / f).
  const uint64_t* table;
  int scale, lanes;
};
struct RansRead {
  const uint32_t* step;   // by slot: 16 bits of frequency, 16 of the place among the symbol's slots
  const uint32_t* value;  // by slot
  const uint8_t *states, *words, *end;
  int scale, lanes;
};

// Growing arrays of what a selector kept: offsets from a base, and the raw 32 bits of each value.
struct Kept {
  uint32_t* offset;
  uint32_t* bits;
  int64_t count, capacity;
};

// The hot loops, compiled once per instruction set. Each takes a range [begin, end) of a whole that starts at a
// multiple of kSplit (5 * kSplit for ternary), so that ranges can run on different threads.
struct Simd {
  const char* name;
  // Encoders return the largest magnitude seen, as a key: 0 is all zero, kNonFinite and above is not finite.
  uint32_t (*qsgd_encode)(const BucketEncode&, int64_t begin, int64_t end);
  uint32_t (*ternary_encode)(const BucketEncode&, int64_t begin, int64_t end);
  uint32_t (*sign_encode)(const BucketEncode&, int64_t begin, int64_t end);
  uint32_t (*onebit_encode)(const BucketEncode&, int64_t begin, int64_t end);
  // Decoders return false when a section holds what no encoder writes.
  bool (*qsgd_decode)(const BucketDecode&, int64_t begin, int64_t end);
  bool (*ternary_decode)(const BucketDecode&, int64_t begin, int64_t end);
  bool (*sign_decode)(const BucketDecode&, int64_t begin, int64_t end);
  bool (*onebit_decode)(const BucketDecode&, int64_t begin, int64_t end);

  uint32_t (*value_range)(const float* x, int64_t begin, int64_t end, float* low, float* high);
  void (*uniform_encode)(const float* x, UniformCoding, uint8_t* packed, int64_t begin, int64_t end, int64_t n);
  void (*uniform_decode)(const uint8_t* packed, UniformCoding, Sink, int64_t begin, int64_t end);
  void (*uniform_symbols8)(const float* x, int64_t n, UniformCoding, uint8_t* out);
  void (*uniform_symbols16)(const float* x, int64_t n, UniformCoding, uint16_t* out);

  // itemsize 2 with exponent mask 0x7C00 or 0x7F80, 4, 8; copies nbytes and tells whether every float was finite.
  bool (*copy_finite)(const uint8_t* from, uint8_t* to, int64_t nbytes, int itemsize, uint64_t exponent);
  bool (*add_raw)(const uint8_t* from, Sink, int64_t begin, int64_t end);
  uint32_t (*cast_encode)(const float* x, bool half, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated);
  bool (*cast_decode)(const uint8_t* from, bool half, Sink, int64_t begin, int64_t end);

  void (*add_momentum)(const float* x, float m, float* velocity, float* residual, int64_t begin, int64_t end);

  // Appends what reaches the threshold; false when it would overflow.
  bool (*compact)(const float* x, int64_t begin, int64_t end, uint32_t threshold, Kept*);
  int64_t (*count_reaching)(const float* x, int64_t begin, int64_t end, uint32_t threshold);
  bool (*compact_hashes)(Key key, int64_t begin, int64_t end, uint32_t at_most, Kept*);
  void (*scatter32)(const int32_t* positions, const float* values, int64_t k, Sink, int64_t begin, int64_t end);
  void (*scatter64)(const int64_t* positions, const float* values, int64_t k, Sink, int64_t begin, int64_t end);

  void (*pack)(const uint32_t* symbols, int64_t n, int bits, uint8_t* out);
  void (*unpack)(const uint8_t* packed, int64_t n, int bits, uint32_t* out);

  void (*linear_encode)(const float* x, const LinearGrid&, int bits, uint8_t* packed, int64_t begin, int64_t end);
  void (*linear_symbols8)(const float* x, int64_t n, const LinearGrid&, uint8_t* out);
  void (*linear_symbols16)(const float* x, int64_t n, const LinearGrid&, uint16_t* out);
  // Each value is the entry of a table of 2^bits.
  void (*table_decode)(const uint8_t* packed, int bits, const float* table, Sink, int64_t begin, int64_t end);
  void (*count_symbols8)(const uint8_t* symbols, int64_t n, int alphabet, uint32_t* counts);
  void (*count_symbols16)(const uint16_t* symbols, int64_t n, int alphabet, uint32_t* counts);

  // Summable codecs. Ranges of values, or of bytes for lane_add.
  void (*block_scales)(const float* x, int64_t n, bool rms, float* out, int64_t begin, int64_t end);
  void (*rotate_blocks)(const float* x, int64_t n, Key key, const float* more, float* out, int64_t begin, int64_t end);
  uint32_t (*lane_encode)(const LaneEncode&, int64_t begin, int64_t end);
  bool (*lane_decode)(const LaneDecode&, int64_t begin, int64_t end);
  void (*lane_add)(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end);
  void (*lane_accumulate)(const uint8_t* packed, int width, int lane, uint8_t* sum, int64_t begin, int64_t end);
  void (*lane_pack)(const uint8_t* sum, int lane, int width, uint8_t* packed, int64_t begin, int64_t end);
  uint32_t (*lane_largest)(const uint8_t* lanes, const LaneCoding&, int64_t n, int64_t begin, int64_t end);
  // Low rank. Ranges of rows, or of columns for project_columns.
  void (*project_rows)(const LowRank&, const float* q, float* out, int64_t begin, int64_t end);
  void (*project_columns)(const LowRank&, const float* p, float* out, int64_t begin, int64_t end);
  void (*lowrank_fill)(const LowRank&, const uint8_t* p, const uint8_t* q, Sink, int64_t begin, int64_t end);

  // Writers of whole chunks. The table holds a code at the top of each entry and its length in the lowest byte.
  void (*huffman_write8)(const uint8_t* symbols, int64_t n, const uint64_t* table, int longest, BitSink&);
  void (*huffman_write16)(const uint16_t* symbols, int64_t n, const uint64_t* table, int longest, BitSink&);
  uint8_t* (*rans_write8)(const RansWrite&, const uint8_t* symbols, int64_t n, uint8_t* end, uint32_t* state);
  uint8_t* (*rans_write16)(const RansWrite&, const uint16_t* symbols, int64_t n, uint8_t* end, uint32_t* state);
  // Readers tell whether the stream ended where it must. `begin` is the chunk's place in the sink.
  bool (*huffman_read_floats)(const HuffmanRead&, const Sink&, int64_t begin);
  bool (*huffman_read8)(const HuffmanRead&, uint8_t* out);
  bool (*huffman_read16)(const HuffmanRead&, uint16_t* out);
  bool (*rans_read_floats)(const RansRead&, const Sink&, int64_t begin, int64_t n);
  bool (*rans_read8)(const RansRead&, int64_t n, uint8_t* out);
  bool (*rans_read16)(const RansRead&, int64_t n, uint16_t* out);
};

const Simd& simd();                   // of this machine, chosen once; LACONIC_ISA in the environment can lower it
const Simd* simd_named(const char*);  // null when unknown or not supported here

uint32_t crc32c(const uint8_t* data, size_t nbytes);

// Runs task(i) for i in [0, tasks) on up to `threads` threads, the caller among them.
void parallel(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& body) {
  parallel(tasks, threads, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body);
}

// --- quantize.cpp: whole tensors, on several threads
using EncodeLoop = uint32_t (*)(const BucketEncode&, int64_t, int64_t);
using DecodeLoop = bool (*)(const BucketDecode&, int64_t, int64_t);
uint32_t encode_buckets(EncodeLoop loop, BucketEncode args, int64_t unit, int threads);
bool decode_buckets(DecodeLoop loop, const BucketDecode& args, int64_t unit, int threads);

struct ValueRange {
  float low, high;
  uint32_t key;
};
ValueRange value_range(const float* x, int64_t n, int threads);
// One value out of each of `count` equal parts of x, where a hash says.
void sample(const float* x, int64_t n, int64_t count, Key key, float* out, int threads);
void histogram(const float* x, int64_t n, const LinearGrid& grid, int64_t* counts, int threads);

// --- select.cpp
// The k entries of largest magnitude, ascending; lowest index first among equals. Returns the largest key.
template <class Index>
uint32_t topk(const float* x, int64_t n, int64_t k, Index* positions, float* values, int threads);
template <class Index>
void topk_double(const double* x, int64_t n, int64_t k, Index* positions, double* values);
// About k by a sampled threshold; capacity 2 k + 16 entries. Returns how many, or -1 when the exact road must serve.
template <class Index>
int64_t topk_sampled(const float* x, int64_t n, int64_t k, Key key, Index* positions, float* values, int threads);
int64_t count_above(const float* x, int64_t n, uint32_t threshold, int threads);
// Returns how many were written, at most capacity.
template <class Index>
int64_t above(const float* x, int64_t n, uint32_t threshold, Index* positions, float* values, int64_t capacity);
template <class Index>
void random_positions(int64_t n, int64_t k, Key key, Index* positions, int threads);
// What stands at the positions, whatever it is.
template <class Index, class Word>
void gather(const Word* x, const Index* positions, int64_t k, Word* out, int threads);
// Values times a gain, saturating; false when one of them is not finite.
bool grow(const float* values, int64_t k, float gain, float* out);

// --- positions.cpp
enum class PositionMode : int { all = 0, rice = 1, bitmap = 2 };
constexpr int64_t kPositionsHeader = 8;
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
// False when the body does not hold k ascending positions below n. The caller has checked the header.
template <class Index>
bool read_positions(const uint8_t* body, int64_t nbytes, PositionMode mode, int low_bits, int64_t k, int64_t n,
                    Index* positions);

// --- book.cpp: which code or share each symbol gets, and how a receiver is told
// Lengths of an optimal prefix code in which none is longer than a limit that follows from the number of symbols in
// use (at least two of them); 0 for symbols that do not occur. Returns the longest.
int code_lengths(const uint32_t* counts, int alphabet, uint8_t* lengths);
// Whole shares of 2^scale in proportion to the counts, at least 1 for each symbol in use, of which there are two or
// more and at most a quarter as many as shares.
void share_out(const uint32_t* counts, int alphabet, int64_t n, int scale, uint32_t* freqs);
// log2(f) in units of 2^-16, for 1 <= f <= 2^15.
uint32_t log2_fixed(uint32_t f);
// A small number per symbol, 0 for those not in use, and with `mantissa` the bits of a share below its leading one.
// Returns the bytes; `out` may be null, to only count them.
int64_t write_book(const uint8_t* classes, const uint32_t* mantissa, int alphabet, uint8_t* out);
// Reads classes and shares back; returns the bytes read, or -1 when it makes no sense.
int64_t read_book(const uint8_t* in, int64_t nbytes, int alphabet, bool shares, uint8_t* classes, uint32_t* freqs);

// --- coder.cpp: sections of coded symbols
enum class Coding : int { huffman = 0, rans = 1, huffman_auto = 2, rans_auto = 3 };
int64_t coded_limit(int64_t n, int alphabet);  // the most bytes a section can take
// The symbols of a tensor: ready-made (one or two bytes each, by alphabet), or made from floats as they are coded, on
// either kind of grid.
struct Symbols {
  const void* ready;
  const float* x;
  const LinearGrid* linear;
  const UniformCoding* uniform;
};
void make_symbols(const Symbols& source, int64_t n, int alphabet, void* out, int threads);
// Returns the bytes of the section. `out` has coded_limit bytes.
int64_t code_symbols(const Symbols& source, int64_t n, int alphabet, Coding coding, uint8_t* out, int threads);
// False when the section is not what a writer makes. Either into symbols, or through a table of alphabet values.
bool decode_symbols(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, void* symbols, int threads);
bool decode_values(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, const float* table, Sink,
                   int threads);
// Bytes of the section that a chunk with these counts becomes under Huffman's code.
int64_t huffman_nbytes(const uint32_t* counts, int alphabet);
// Between a quantizer's packed symbols and ready-made ones (a byte each, or two where the alphabet exceeds 256).
void unpack_symbols(const uint8_t* packed, int64_t n, int alphabet, bool trits, void* symbols);
void pack_symbols(const void* symbols, int64_t n, int alphabet, bool trits, uint8_t* packed);
// Modes of a section's chunks, one byte each; false when it cannot be read.
bool coded_modes(const uint8_t* section, int64_t nbytes, int64_t n, uint8_t* modes);

}  // namespace laconic
