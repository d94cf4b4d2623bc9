// Operations on vectors that PyTorch computes by way of the stack, by masked stores or one element after the other. `toolchain`
// lets the code of Inductor call these. They return what PyTorch's return, in every element.

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#define TORCHWRAP_INLINE __attribute__((always_inline)) inline  // so that counts are constants

namespace torchwrap {

using at::vec::Vectorized;
using at::vec::VectorizedN;

// A register, and its first 32 bytes.
#ifdef CPU_CAPABILITY_AVX2
using Register = __m256i;
using Unaligned = __m256i_u;
using Floats = __m256;
using Doubles = __m256d;
TORCHWRAP_INLINE Register widened(__m256i bits) { return bits; }
TORCHWRAP_INLINE __m256i first_bytes(Register bits) { return bits; }
#else
using Register = __m512i;
using Unaligned = __m512i_u;
using Floats = __m512;
using Doubles = __m512d;
TORCHWRAP_INLINE Register widened(__m256i bits) { return _mm512_zextsi256_si512(bits); }
TORCHWRAP_INLINE __m256i first_bytes(Register bits) { return _mm512_castsi512_si256(bits); }
#endif

// Whether a vector is one register. A vector of bool is none.
template <typename T>
constexpr bool is_plain =
    std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_convertible_v<Vectorized<T>, Register>;

template <typename T>
TORCHWRAP_INLINE Register bits(const Vectorized<T>& vector) {
  if constexpr (std::is_same_v<T, float>) return reinterpret_cast<Register>(static_cast<Floats>(vector));
  else if constexpr (std::is_same_v<T, double>) return reinterpret_cast<Register>(static_cast<Doubles>(vector));
  else return vector;
}

template <typename T>
TORCHWRAP_INLINE Vectorized<T> vector(Register bits) {
  if constexpr (std::is_same_v<T, float>) return reinterpret_cast<Floats>(bits);
  else if constexpr (std::is_same_v<T, double>) return reinterpret_cast<Doubles>(bits);
  else return bits;
}

// Whether a part of a vector is read and written without a mask: a known number of bytes, up to 32.
template <typename T>
TORCHWRAP_INLINE bool is_short(int64_t count) {
  int64_t number = count * sizeof(T);
  return __builtin_constant_p(number) && number > 0 && number <= 32 && number % 4 == 0;
}

// Up to 16 bytes, a multiple of 4; the others are 0.
TORCHWRAP_INLINE __m128i load_bytes(const char* from, int64_t number) {
  if (number >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  __m128i found = number >= 8 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)) : _mm_setzero_si128();
  if (number % 8 == 0) return found;
  int32_t last;
  std::memcpy(&last, from + number - 4, 4);
  return number < 8 ? _mm_cvtsi32_si128(last) : _mm_insert_epi32(found, last, 2);
}

TORCHWRAP_INLINE void store_bytes(char* to, __m128i value, int64_t number) {
  if (number >= 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  if (number >= 8) _mm_storel_epi64(reinterpret_cast<__m128i*>(to), value);
  if (number % 8 == 0) return;
  int32_t last = number < 8 ? _mm_cvtsi128_si32(value) : _mm_extract_epi32(value, 2);
  std::memcpy(to + number - 4, &last, 4);
}

// Elements after the last one are 1 in vectors of integers, by which something may be divided, and 0 in others.
template <typename T>
constexpr auto after_last = [] {
  std::array<T, 2 * Vectorized<T>::size()> zeros_and_ones{};
  for (int i = Vectorized<T>::size(); i < 2 * Vectorized<T>::size(); i++) zeros_and_ones[i] = std::is_integral_v<T>;
  return zeros_and_ones;
}();

template <typename T>
TORCHWRAP_INLINE Vectorized<T> load(const void* from, int64_t count = Vectorized<T>::size()) {
  if constexpr (is_plain<T>) {
    int64_t size = Vectorized<T>::size(), number = count * sizeof(T);
    auto first = static_cast<const char*>(from);
    if (__builtin_constant_p(count) && count == size) return vector<T>(*reinterpret_cast<const Unaligned*>(first));
    if (is_short<T>(count)) {
      __m256i found = _mm256_zextsi128_si256(load_bytes(first, number));
      if (number > 16) found = _mm256_inserti128_si256(found, load_bytes(first + 16, number - 16), 1);
      if constexpr (!std::is_integral_v<T>) return vector<T>(widened(found));
      auto rest = reinterpret_cast<const Unaligned*>(after_last<T>.data() + size - count);
      return vector<T>(widened(found) | *rest);
    }
  }
  return Vectorized<T>::loadu(from, count);
}

template <typename T, int N>
TORCHWRAP_INLINE void store(at::vec::VecMask<T, N> mask, bool* to, int count = at::vec::VecMask<T, N>::size()) {
  mask.store(to, count);
}

template <typename T>
TORCHWRAP_INLINE void store(const Vectorized<T>& value, void* to, int64_t count = Vectorized<T>::size()) {
  if constexpr (is_plain<T>) {
    if (is_short<T>(count) && count < Vectorized<T>::size()) {
      int64_t number = count * sizeof(T);
      auto first = static_cast<char*>(to);
      __m256i found = first_bytes(bits<T>(value));
      store_bytes(first, _mm256_castsi256_si128(found), number);
      if (number > 16) store_bytes(first + 16, _mm256_extracti128_si256(found, 1), number - 16);
      return;
    }
  }
  value.store(to, count);
}

// Writes past the caches where the address is a multiple of the number of bytes. Another thread sees it after a locked
// instruction of this one, such as those of OpenMP's barrier, and of Python's lock, which a graph takes at its end.
template <typename T, typename To>
TORCHWRAP_INLINE void stream(const Vectorized<T>& value, To* to, int64_t count = Vectorized<T>::size()) {
  if constexpr (is_plain<T>) {
    int64_t number = count * sizeof(T);
    if (__builtin_constant_p(number) && reinterpret_cast<uintptr_t>(to) % number == 0) {
      Register found = bits<T>(value);
      void* address = to;
      if (number == 16) return _mm_stream_si128(static_cast<__m128i*>(address), _mm256_castsi256_si128(first_bytes(found)));
      if (number == 32) return _mm256_stream_si256(static_cast<__m256i*>(address), first_bytes(found));
#ifdef CPU_CAPABILITY_AVX512
      if (number == 64) return _mm512_stream_si512(static_cast<__m512i*>(address), found);
#endif
    }
  }
  store<T>(value, to, count);
}

template <typename T, int N>
TORCHWRAP_INLINE VectorizedN<T, N> load(const void* from, int64_t count = VectorizedN<T, N>::size()) {
  constexpr int64_t size = Vectorized<T>::size();
  VectorizedN<T, N> found;
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    int64_t left = std::min(count - i * size, size);
    found[i] = left > 0 ? load<T>(static_cast<const T*>(from) + i * size, left) : Vectorized<T>(T(1));
  }
  return found;
}

template <typename T, int N>
TORCHWRAP_INLINE void store(const VectorizedN<T, N>& value, void* to, int64_t count = VectorizedN<T, N>::size()) {
  constexpr int64_t size = Vectorized<T>::size();
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    int64_t left = std::min(count - i * size, size);
    if (left > 0) store<T>(value[i], static_cast<T*>(to) + i * size, left);
  }
}

template <typename Value, typename To, typename... Count>
TORCHWRAP_INLINE void stream(const Value& value, To* to, Count... count) {
  store(value, to, count...);
}

// Products, shifts and logical operators of int64. Most are those of Philox, on the lower halves of each element.
#ifdef CPU_CAPABILITY_AVX2
TORCHWRAP_INLINE Register product_of_lower_halves(Register a, Register b) { return _mm256_mul_epu32(a, b); }

TORCHWRAP_INLINE Register shifted(Register a, Register by) {
  Register sign = _mm256_cmpgt_epi64(_mm256_setzero_si256(), a);
  return _mm256_xor_si256(_mm256_srlv_epi64(_mm256_xor_si256(a, sign), by), sign);
}

TORCHWRAP_INLINE Register upper_halves(Register a) {
  return _mm256_blend_epi32(_mm256_srli_epi64(a, 32), _mm256_srai_epi32(a, 31), 0xAA);
}
#else
TORCHWRAP_INLINE Register product_of_lower_halves(Register a, Register b) { return _mm512_mul_epu32(a, b); }
TORCHWRAP_INLINE Register shifted(Register a, Register by) { return _mm512_srav_epi64(a, by); }
TORCHWRAP_INLINE Register upper_halves(Register a) { return _mm512_srai_epi64(a, 32); }
#endif

using Unsigned = unsigned long long __attribute__((vector_size(sizeof(Register))));

TORCHWRAP_INLINE Register unsigned_shifted(Register a, int by) { return Register(Unsigned(a) >> by); }

template <int N>
using Integers = VectorizedN<int64_t, N>;

// Integers that all have a value which operators know by the type. `toolchain` lets the code of Inductor make these.
template <int64_t value, int N>
struct Constant : Integers<N> {
  TORCHWRAP_INLINE Constant() : Integers<N>(value) {}
};

// Integers, and others that are equal in the lower half of each element and take fewer instructions. A product of lower halves
// reads nothing else, so g++ leaves out what only the upper halves need.
template <int N>
struct Halves : Integers<N> {
  Integers<N> low;
};

// The upper halves are 0.
template <int N>
struct Narrow : Halves<N> {};

template <typename T>
constexpr int registers = 0;
template <int N>
constexpr int registers<Integers<N>> = N;
template <int N>
constexpr int registers<Halves<N>> = N;
template <int N>
constexpr int registers<Narrow<N>> = N;
template <int64_t value, int N>
constexpr int registers<Constant<value, N>> = N;

template <typename T>
constexpr int64_t value_of = -1;  // of a constant that is not negative
template <int64_t value, int N>
constexpr int64_t value_of<Constant<value, N>> = value;

template <typename T>
constexpr bool is_narrow = value_of<T> >= 0 && value_of<T> >> 32 == 0;
template <int N>
constexpr bool is_narrow<Narrow<N>> = true;

template <typename A, typename B>
concept Same = registers<A> > 0 && registers<A> == registers<B>;

template <int N>
TORCHWRAP_INLINE const Integers<N>& low(const Integers<N>& value) {
  return value;
}

template <int N>
TORCHWRAP_INLINE const Integers<N>& low(const Halves<N>& value) {
  return value.low;
}

template <bool a_is_narrow = false, bool b_is_narrow = false>
TORCHWRAP_INLINE Register product(Register a, Register b) {
#ifdef CPU_CAPABILITY_AVX2
  Register upper{};
  if constexpr (!a_is_narrow) upper += product_of_lower_halves(unsigned_shifted(a, 32), b);
  if constexpr (!b_is_narrow) upper += product_of_lower_halves(a, unsigned_shifted(b, 32));
  return product_of_lower_halves(a, b) + (upper << 32);
#else
  return _mm512_mullo_epi64(a, b);
#endif
}

template <typename A, typename B>
TORCHWRAP_INLINE auto multiply(const A& a, const B& b) {
  Integers<registers<A>> results;
#pragma GCC unroll 8
  for (int i = 0; i < registers<A>; i++) {
    if constexpr (is_narrow<A> && is_narrow<B>) results[i] = product_of_lower_halves(low(a)[i], low(b)[i]);
    else results[i] = product<is_narrow<A>, is_narrow<B>>(a[i], b[i]);
  }
  return results;
}

template <typename A, typename B>
TORCHWRAP_INLINE auto shift_right(const A& a, const B& b) {
  constexpr int64_t by = value_of<B>;
  std::conditional_t<is_narrow<A> && (by >= 0 && by < 64), Narrow<registers<A>>, Halves<registers<A>>> results;
#pragma GCC unroll 8
  for (int i = 0; i < registers<A>; i++) {
    if constexpr (by >= 0 && by < 64 && is_narrow<A>) {
      results[i] = results.low[i] = unsigned_shifted(a[i], by);
    } else if constexpr (by == 32) {
      results[i] = upper_halves(a[i]);
      results.low[i] = unsigned_shifted(a[i], 32);
    } else {
      results[i] = results.low[i] = shifted(a[i], b[i]);
    }
  }
  return results;
}

template <typename A, typename B>
TORCHWRAP_INLINE auto bitwise_and(const A& a, const B& b) {
  constexpr bool keeps_lower_halves = value_of<B> == 0xFFFFFFFF;
  std::conditional_t<is_narrow<A> || is_narrow<B>, Narrow<registers<A>>, Halves<registers<A>>> results;
#pragma GCC unroll 8
  for (int i = 0; i < registers<A>; i++) {
    results[i] = (keeps_lower_halves ? low(a)[i] : a[i]) & b[i];
    results.low[i] = keeps_lower_halves ? low(a)[i] : results[i];
  }
  return results;
}

template <typename A, typename B>
TORCHWRAP_INLINE auto bitwise_xor(const A& a, const B& b) {
  Halves<registers<A>> results;
#pragma GCC unroll 8
  for (int i = 0; i < registers<A>; i++) {
    results[i] = a[i] ^ b[i];
    results.low[i] = low(a)[i] ^ low(b)[i];
  }
  return results;
}

}  // namespace torchwrap

// Functions that are no templates, or templates of fewer parameters, are preferred to PyTorch's, and so are exact matches.
namespace at::vec {
inline namespace CPU_CAPABILITY {

#ifdef CPU_CAPABILITY_AVX2
TORCHWRAP_INLINE Vectorized<int64_t> operator*(const Vectorized<int64_t>& a, const Vectorized<int64_t>& b) {
  return torchwrap::product(a, b);
}

TORCHWRAP_INLINE Vectorized<int64_t> operator>>(const Vectorized<int64_t>& a, const Vectorized<int64_t>& b) {
  return torchwrap::shifted(a, b);
}
#endif

#define TORCHWRAP_OPERATOR(symbol, name)                                                                              \
  template <typename A, typename B>                                                                                   \
    requires torchwrap::Same<A, B>                                                                                    \
  TORCHWRAP_INLINE auto operator symbol(const A& a, const B& b) {                                                     \
    return torchwrap::name(a, b);                                                                                     \
  }                                                                                                                   \
  template <int N>                                                                                                    \
  TORCHWRAP_INLINE auto operator symbol(const VectorizedN<int64_t, N>& a, const VectorizedN<int64_t, N>& b) {         \
    return torchwrap::name(a, b);                                                                                     \
  }

TORCHWRAP_OPERATOR(*, multiply)
TORCHWRAP_OPERATOR(>>, shift_right)
TORCHWRAP_OPERATOR(&, bitwise_and)
TORCHWRAP_OPERATOR(^, bitwise_xor)

}  // namespace CPU_CAPABILITY
}  // namespace at::vec
#endif
