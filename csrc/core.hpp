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

  // itemsize 2 with exponent mask 0x7C00 or 0x7F80, 4, 8; copies nbytes and tells whether every float was finite.
  bool (*copy_finite)(const uint8_t* from, uint8_t* to, int64_t nbytes, int itemsize, uint64_t exponent);
  bool (*add_raw)(const uint8_t* from, Sink, int64_t begin, int64_t end);
  uint32_t (*cast_encode)(const float* x, bool half, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated);
  bool (*cast_decode)(const uint8_t* from, bool half, Sink, int64_t begin, int64_t end);

  // Appends what reaches the threshold; false when it would overflow.
  bool (*compact)(const float* x, int64_t begin, int64_t end, uint32_t threshold, Kept*);
  int64_t (*count_reaching)(const float* x, int64_t begin, int64_t end, uint32_t threshold);
  bool (*compact_hashes)(Key key, int64_t begin, int64_t end, uint32_t at_most, Kept*);
  void (*scatter32)(const int32_t* positions, const float* values, int64_t k, Sink, int64_t begin, int64_t end);
  void (*scatter64)(const int64_t* positions, const float* values, int64_t k, Sink, int64_t begin, int64_t end);

  void (*pack)(const uint32_t* symbols, int64_t n, int bits, uint8_t* out);
  void (*unpack)(const uint8_t* packed, int64_t n, int bits, uint32_t* out);
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

}  // namespace laconic
