# Helpers by which every target of the tree is made, so that warnings, sanitizers and floating-point rules are the same everywhere.

add_library(layerd_options INTERFACE)
# -ffp-contract=off: gcc otherwise fuses Mul and Add of its own accord on targets that have FMA, and the bits of a result
# would depend on the CPU (docs/numerics.md, N2). What is fused is written as a fused operation.
# gcc 12 takes std::optional members for maybe-uninitialized wherever they are moved, and sees overlaps in std::string's
# operator+ (its bug 105651): both warnings are off.
target_compile_options(layerd_options INTERFACE
  -ffp-contract=off -Wall -Wextra -Wshadow -Wno-unused-parameter -Wno-missing-field-initializers -Wno-maybe-uninitialized -Wno-restrict
  $<$<BOOL:${LAYERD_WERROR}>:-Werror>)
if(LAYERD_SANITIZE)
  target_compile_options(layerd_options INTERFACE -fsanitize=${LAYERD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(layerd_options INTERFACE -fsanitize=${LAYERD_SANITIZE})
endif()

# layerd_library(NAME name SRCS … HDRS … DEPS … PRIVATE_DEPS …): the static library layerd_<name>, alias layerd::<name>.
# HDRS are installed with the package; DEPS are what the headers need, PRIVATE_DEPS what only the sources need.
function(layerd_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;HDRS;DEPS;PRIVATE_DEPS" ${ARGN})
  set(target layerd_${ARG_NAME})
  add_library(${target} STATIC ${ARG_SRCS})
  add_library(layerd::${ARG_NAME} ALIAS ${target})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${ARG_HDRS})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    # Users write <layerd/client/remote_engine.h>; our own headers include each other from the root.
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/layerd>)
  target_link_libraries(${target} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS} $<BUILD_INTERFACE:layerd_options>)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${ARG_NAME})
endfunction()

# layerd_test(NAME name SRCS … DEPS … LABELS …): a GoogleTest program whose cases ctest runs one by one.
# In no build are tests optimised much, but the slow ones: that is where most of the time to build them would go.
function(layerd_test)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS;LABELS" ${ARGN})
  set(target ${ARG_NAME})
  add_executable(${target} ${ARG_SRCS})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  if(NOT "slow" IN_LIST ARG_LABELS)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  target_link_libraries(${target} PRIVATE ${ARG_DEPS} layerd_options GTest::gmock GTest::gtest_main)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${target} COMMAND ${target})
  set_tests_properties(${target} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 600)
endfunction()
