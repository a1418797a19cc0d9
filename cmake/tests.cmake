# C++ tests and C examples. What needs a GPU (<name>_cuda) is built here and run by the GPU bundle's run.sh;
# ctest runs it only where this machine has one.

# --- The libraries themselves -------------------------------------------------------------------------------------
# go-nvml's linker flags hide a missing symbol of ours until it is called: this is the one place that finds it. It links
# the whole archive with the libraries that internal/core's #cgo line names and no others (the C driver adds none).
set(ar_link_line -lstdc++ -lm -ldl -lpthread)
if(AR_WITH_CUDA)
  file(STRINGS internal/core/flags_cuda.go ar_link_line REGEX "^// #cgo LDFLAGS:")
  string(REGEX REPLACE "^// #cgo LDFLAGS: *" "" ar_link_line "${ar_link_line}")
  string(REGEX REPLACE "-L[^ ]*" "-L${PROJECT_BINARY_DIR}" ar_link_line "${ar_link_line}")
  separate_arguments(ar_link_line UNIX_COMMAND "${ar_link_line}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS internal/core/flags_cuda.go)
endif()
add_test(NAME strict_link COMMAND ${CMAKE_C_COMPILER} -shared -o strict_link.so -Wl,--no-undefined
  -Wl,--whole-archive $<TARGET_FILE:allreduce> -Wl,--no-whole-archive ${ar_link_line})
add_test(NAME symbols
  COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/check-symbols.sh $<TARGET_FILE:allreduce> $<TARGET_FILE:allreduce_shared>)
# With the compiler that the project is built with; another one may allocate registers otherwise.
if(AR_WITH_CUDA AND CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.0\\.")
  add_test(NAME no_spills COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/check-spills.sh
    ${PROJECT_BINARY_DIR}/ptxas-allreduce_cuda_objects.log)
endif()

# --- C examples, against the archive and the shared library ---------------------------------------------------------
file(GLOB ar_examples CONFIGURE_DEPENDS examples/c/*.c)
foreach(source IN LISTS ar_examples)
  get_filename_component(name ${source} NAME_WE)
  foreach(kind static shared)
    set(target example_${name}_${kind})
    add_executable(${target} ${source})
    set_target_properties(${target} PROPERTIES
      C_STANDARD 11 RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/examples)
    target_compile_options(${target} PRIVATE -Wall -Wextra)
    if(kind STREQUAL "static")
      target_link_libraries(${target} PRIVATE allreduce)
      set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
    else()
      target_link_libraries(${target} PRIVATE allreduce_shared)
    endif()
    add_test(NAME ${target} COMMAND ${target})
  endforeach()
endforeach()

# --- GoogleTest -----------------------------------------------------------------------------------------------------
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(STATUS "GoogleTest not found: C++ tests are not built (Debian: apt-get install libgtest-dev)")
  return()
endif()
include(GoogleTest)

# Static libstdc++: the binaries go into the GPU bundle as they are.
function(ar_test name)
  add_executable(${name} ${ARGN})
  target_include_directories(${name} PRIVATE csrc csrc/include tests/cpp)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra> $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
  target_link_libraries(${name} PRIVATE allreduce GTest::gtest_main)
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
endfunction()

file(GLOB ar_tests CONFIGURE_DEPENDS tests/cpp/*_test.cpp)
list(FILTER ar_tests EXCLUDE REGEX "/conformance[^/]*$")
foreach(source IN LISTS ar_tests)
  get_filename_component(name ${source} NAME_WE)
  ar_test(${name} ${source})
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 600)
endforeach()

# One source for every platform: the emulator's idea of CUDA is held against CUDA.
file(GLOB ar_conformance CONFIGURE_DEPENDS tests/cpp/conformance*.cpp)
foreach(source IN LISTS ar_conformance)
  get_filename_component(name ${source} NAME_WE)
  ar_test(${name} ${source})
  target_compile_definitions(${name} PRIVATE AR_PLATFORM_EMULATED)
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 600)
  if(AR_WITH_CUDA)
    set(cu ${PROJECT_BINARY_DIR}/generated/${name}.cu)
    file(CONFIGURE OUTPUT ${cu} CONTENT "#include \"@source@\"\n" @ONLY)
    ar_test(${name}_cuda ${cu})
    target_compile_definitions(${name}_cuda PRIVATE AR_PLATFORM_CUDA)
    ar_cuda_flags(${name}_cuda)
    if(EXISTS /dev/nvidia0)
      add_test(NAME ${name}_cuda COMMAND ${name}_cuda)
    endif()
  endif()
endforeach()
