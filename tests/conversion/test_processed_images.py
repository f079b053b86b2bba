"""Pictures that a processor of transformers cuts into patches for a tower: fitted as any folder is."""

import pytest
import torch
from foreign_packs import PACKS
from PIL import Image
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import align, distil, load_converted, save_converted
from subquad.conversion.unlabelled_images import as_batches

transformers = pytest.importorskip("transformers")

# what makes a processor of each tower's patches, which are of 8 px in these towers
PROCESSORS = {
    "transformers Qwen3-VL": ("Qwen2VLImageProcessor", {"patch_size": 8, "min_pixels": 256, "max_pixels": 4096}),
    "transformers GLM-4V": (
        "Glm4vImageProcessor",
        {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 8192}},
    ),
    "transformers MiniMax M3": ("Qwen2VLImageProcessor", {"patch_size": 8, "min_pixels": 256, "max_pixels": 4096}),
    "transformers SigLIP 2, NaFlex": ("Siglip2ImageProcessor", {"patch_size": 8, "max_num_patches": 60}),
    "transformers Pixtral": (
        "PixtralImageProcessor",
        {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 64}},
    ),
    "transformers Pix2Struct": ("Pix2StructImageProcessor", {"patch_size": {"height": 8, "width": 8}}),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    for number, size in enumerate([(90, 70), (60, 100), (80, 80), (64, 120)]):
        pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_tower_is_fitted_to_a_folder_through_its_processor(name, photos):
    kind, settings = PROCESSORS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    tower, processor = PACKS[name][0]().eval().tower, getattr(transformers, kind)(**settings)
    if "Pix2" in name:
        processor.max_patches = 64
    student = subquad.convert(tower, "linear")
    fit = {"teacher": tower, "config": processor, "batch_size": 2, "updates": 2}
    aligned, distilled = align(student, photos, **fit), distil(student, photos, **fit)
    for block, error in aligned.after.items():
        assert 0 < error <= aligned.before[block]
    assert all(torch.tensor(losses)[:, 1].isfinite().all() for losses in distilled.judged.values())


def test_what_is_no_processor_is_refused(photos):
    tower = PACKS["transformers Qwen3-VL"][0]().eval().tower
    student = subquad.convert(tower, "linear")
    with pytest.raises(SubquadError, match="an InputConfig, or a processor of transformers, got 224"):
        align(student, photos, teacher=tower, config=224)


def test_what_the_network_does_not_take_is_said(photos):
    class Tower(nn.Module):
        def forward(self, films):
            return films

    batches = as_batches(photos, batch_size=2, config=transformers.SiglipImageProcessor(), network=Tower())
    given = batches(0)
    assert given.keys() == {"films"} and given["films"].shape[1:] == (3, 224, 224)
    with pytest.raises(SubquadError, match="Pix2StructImageProcessor gives flattened_patches, attention_mask, and"):
        as_batches(photos, batch_size=2, config=transformers.Pix2StructImageProcessor(), network=Tower())(0)


def test_a_network_of_language_answers_with_a_students_tower(photos, tmp_path):
    configured = transformers.models.qwen3_vl.configuration_qwen3_vl
    language = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    language |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99}
    sizes = {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "patch_size": 8}
    sizes |= {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = configured.Qwen3VLConfig(
        text_config=language, vision_config=sizes, image_token_id=90, vision_start_token_id=91, vision_end_token_id=92
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    processor = transformers.Qwen2VLImageProcessor(patch_size=8, min_pixels=256, max_pixels=4096)
    pictures = processor(images=[Image.open(photos / "0.png")], return_tensors="pt")
    count = int(pictures["image_grid_thw"].prod()) // 4
    words = torch.tensor([[1, 91, *[90] * count, 92, 5]])
    asked = {"input_ids": words, "mm_token_type_ids": (words == 90).int(), **pictures}

    how = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def said():
        with torch.no_grad():
            return model.generate(**asked, **how)

    tower, expected = model.model.visual, said()
    model.model.visual = subquad.convert(tower, "softmax")
    torch.testing.assert_close(torch.stack(said().logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-5)
    student = subquad.convert(tower, "linear")
    align(student, photos, teacher=tower, config=processor, batch_size=2, updates=1)
    save_converted(student, tmp_path / "student.safetensors")
    model.model.visual = load_converted(tmp_path / "student.safetensors", tower)
    answered = said()
    model.model.visual = student
    torch.testing.assert_close(torch.stack(answered.logits), torch.stack(said().logits))
